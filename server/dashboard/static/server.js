// Talking to the server: facts that are read again and again, actions, and the session.

import { useEffect, useRef, useState } from "./vendor/preact-htm.js";

/** An answer of the server that is no success; `message` says what to do. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// seconds by which this browser's clock is behind the server's
let skew = 0;

/** The server's time, UTC seconds since 1970. */
export const now = () => Date.now() / 1000 + skew;

async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(`dashboard/${path}`, { credentials: "same-origin", ...options });
  } catch {
    throw new Refused(0, "The server does not answer. The page tries again by itself.");
  }
  const date = Date.parse(answer.headers.get("date"));
  // the header has whole seconds: a small difference is none
  if (date) skew = Math.abs(date - Date.now()) > 2000 ? (date - Date.now()) / 1000 : 0;
  if (answer.ok) return answer.status === 204 ? null : answer.json();
  let text = `The server answered ${answer.status}.`;
  try {
    text = (await answer.json()).error;
  } catch {
    // not JSON: the status must do
  }
  if (answer.status === 401) dispatchEvent(new Event("signed-out"));
  throw new Refused(answer.status, text);
}

/** Change something; `path` is that of an action. */
export const act = (path, body = {}) =>
  ask(`actions/${path}`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });

let session = {};

/** Whether the person who is signed in may change anything; the server refuses it in any case. */
export const mayAct = () => !session.reads_only;

/** The server's folder, or a file in it, as commands on its machine name it. */
export function inState(path = "") {
  const text = [session.state, path].filter(Boolean).join("/");
  return /^[\w@%+=:,./~-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

async function signedIn(answer) {
  session = await answer;
  return session;
}

export const whoIsThere = () => signedIn(ask("session"));

export const signIn = (link) =>
  signedIn(
    ask("session", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ link }),
    }),
  );

export const signOut = () => ask("session", { method: "DELETE" });

/** Facts of a page, read again every so many seconds while the page is seen.
 *
 * `seconds`: a number, or a function that gives it for the last facts, which may be null.
 * Returns: `facts` (null before the first answer), `error` (of the last read, or null), and
 * `reload`, which reads at once.
 */
export function useFacts(path, seconds = 3) {
  const [found, setFound] = useState({ facts: null, error: null, path });
  const again = useRef(() => {});
  useEffect(() => {
    let timer = null;
    let gone = false;
    let last = null;
    const read = async () => {
      clearTimeout(timer);
      if (!document.hidden) {
        try {
          const facts = await ask(`facts/${path}`);
          last = facts;
          if (!gone) setFound({ facts, error: null, path });
        } catch (error) {
          // what was read for another path is no answer to this one
          if (!gone) setFound((last) => ({ facts: last.path === path ? last.facts : null, error, path }));
          if (error.status === 401) return;
        }
      }
      clearTimeout(timer);
      if (!gone) timer = setTimeout(read, 1000 * (typeof seconds === "function" ? seconds(last) : seconds));
    };
    const seen = () => document.hidden || read();
    again.current = read;
    document.addEventListener("visibilitychange", seen);
    read();
    return () => {
      gone = true;
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", seen);
    };
  }, [path, seconds]);
  const facts = found.path === path ? found.facts : null;
  return { facts, error: found.error, reload: () => again.current() };
}
