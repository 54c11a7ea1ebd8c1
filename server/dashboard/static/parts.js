// Parts that pages are made of.

import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { act, mayAct } from "./server.js";

const ICONS = {
  fleet: "M4 6h16v9H4zM9 19h6M12 15v4",
  models: "M12 3l8 4.5v9L12 21l-8-4.5v-9zM4 7.5l8 4.5 8-4.5M12 12v9",
  rollouts: "M4 17l5-5 4 4 7-8M15 8h5v5",
  training: "M3 12h4l3-8 4 16 3-8h4",
  alerts: "M6 16V11a6 6 0 1 1 12 0v5l1.5 2h-15zM10 20a2 2 0 0 0 4 0",
  audit: "M6 3h9l4 4v14H6zM9 11h7M9 15h7M9 7h3",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  done: "M4 12.5l5 5L20 6.5",
  out: "M14 4h5v16h-5M4 12h11M8 8l-4 4 4 4",
};

export const Icon = ({ name }) => html`
  <svg class="icon" viewBox="0 0 24 24" aria-hidden="true"><path d=${ICONS[name]} /></svg>
`;

export const Badge = ({ tone = "plain", children, title }) =>
  html`<span class="badge ${tone}" title=${title}>${children}</span>`;

/** One number with its meaning. */
export const Figure = ({ label, value, note, tone = "" }) => html`
  <div class="figure ${tone}">
    <div class="label">${label}</div>
    <div class="value">${value}</div>
    ${note && html`<div class="note">${note}</div>`}
  </div>
`;

export const Card = ({ title, note, actions, children, tone = "" }) => html`
  <section class="card ${tone}">
    ${title &&
    html`<header>
      <h2>${title}</h2>
      ${note && html`<span class="note">${note}</span>`}
      <span class="push">${actions}</span>
    </header>`}
    ${children}
  </section>
`;

/** Pairs of a word and its value. */
export const Pairs = ({ of }) => html`
  <dl class="pairs">
    ${of
      .filter((pair) => pair)
      .map(([word, value]) => html`<div><dt>${word}</dt><dd>${value}</dd></div>`)}
  </dl>
`;

/** A command to type, with a button that copies it. */
export function Command({ text }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      return; // without TLS browsers keep the clipboard to themselves; the text can be selected
    }
    setCopied(true);
    setTimeout(() => setCopied(false), 1500);
  };
  return html`
    <div class="command">
      <code>${text}</code>
      <button class="plain" onClick=${copy} aria-label="Copy the command" title="Copy">
        <${Icon} name=${copied ? "done" : "copy"} />
      </button>
    </div>
  `;
}

export const Empty = ({ title, children }) => html`
  <div class="empty">
    <h2>${title}</h2>
    ${children}
  </div>
`;

/** What a page shows before its facts are there, or in place of facts it could not read. */
export const Waiting = ({ error }) =>
  error
    ? html`<div class="notice bad" role="alert">${error.message}</div>`
    : html`<div class="waiting" role="status">Reading …</div>`;

/** A line above facts that could not be read again. */
export const Stale = ({ error }) =>
  error && html`<div class="notice warn" role="status">${error.message}</div>`;

/** A dialog over the page; `onClose` is called when the reader leaves it. */
export function Dialog({ title, onClose, children }) {
  const dialog = useRef(null);
  useEffect(() => {
    dialog.current.showModal();
  }, []);
  return html`
    <dialog ref=${dialog} onClose=${onClose} aria-label=${title}>
      <h2>${title}</h2>
      ${children}
    </dialog>
  `;
}

/** A button that asks once, then does an action of the server; nothing for a person who only reads.
 *
 * `path`, `body`: the action. `title`: of the question, `label` if it is left out. `question`: what happens then, as a sentence. `onDone`: called after.
 */
export function Action({ label, title = label, question, path, body, onDone, tone = "", yes = null }) {
  const [asked, setAsked] = useState(false);
  if (!mayAct()) return null;
  return html`
    <button class=${tone} onClick=${() => setAsked(true)}>${label}</button>
    ${asked &&
    html`<${Question}
      title=${`${title}?`}
      question=${question}
      yes=${yes || label}
      tone=${tone}
      act=${() => act(path, body)}
      onClose=${() => setAsked(false)}
      onDone=${onDone}
    />`}
  `;
}

/** A dialog that asks before `act`; its children are fields of what is asked. */
export function Question({ title, question, yes, tone = "", act: run, onClose, onDone, children }) {
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const go = async (event) => {
    event.preventDefault();
    setBusy(true);
    try {
      const answer = await run();
      onClose();
      if (answer && answer.done) say(answer.done);
      if (onDone) onDone(answer);
    } catch (refused) {
      setError(refused.message);
      setBusy(false);
    }
  };
  return html`
    <${Dialog} title=${title} onClose=${onClose}>
      <p>${question}</p>
      <form onSubmit=${go}>
        ${children}
        ${error && html`<div class="notice bad" role="alert">${error}</div>`}
        <div class="buttons">
          <button type="button" onClick=${onClose}>Cancel</button>
          <button class="main ${tone}" disabled=${busy}>${yes}</button>
        </div>
      </form>
    <//>
  `;
}

/** Say a sentence at the foot of the page for some seconds. */
export const say = (text) => dispatchEvent(new CustomEvent("said", { detail: text }));

export function Said() {
  const [text, setText] = useState("");
  useEffect(() => {
    let timer = null;
    const heard = (event) => {
      setText(event.detail);
      clearTimeout(timer);
      timer = setTimeout(() => setText(""), 5000);
    };
    addEventListener("said", heard);
    return () => removeEventListener("said", heard);
  }, []);
  return html`<div class="said ${text ? "shown" : ""}" role="status" aria-live="polite">${text}</div>`;
}

/** A table that sorts by a click on a heading; on a phone each row is a card.
 *
 * `columns`: `{label, of(row) -> value to sort by, cell(row) -> what is shown, right, wide}`; the
 * first is the row's name, and `wide` takes a line of its own on a phone. `rows`: any objects. `keyOf(row)`. `start`: index of the column to sort by.
 */
export function Table({ columns, rows, keyOf, start = 0, down = false, label }) {
  const [order, setOrder] = useState({ column: start, down });
  const sorted = [...rows].sort((a, b) => compare(columns[order.column], a, b, order.down));
  const head = (column, index) => {
    const on = order.column === index;
    const turn = () => setOrder({ column: index, down: on ? !order.down : Boolean(column.right) });
    return html`
      <th class=${column.right ? "right" : ""} aria-sort=${on ? (order.down ? "descending" : "ascending") : "none"}>
        <button class="plain" onClick=${turn}>
          ${column.label}<span class="arrow">${on ? (order.down ? "▾" : "▴") : ""}</span>
        </button>
      </th>
    `;
  };
  return html`
    <div class="table">
      <table aria-label=${label}>
        <thead><tr>${columns.map(head)}</tr></thead>
        <tbody>
          ${sorted.map(
            (row) => html`
              <tr key=${keyOf(row)}>
                ${columns.map(
                  (column) => html`
                    <td class=${[column.right && "right", column.wide && "wide"].filter(Boolean).join(" ")} data-label=${column.label}>
                      <div class="cell">${column.cell ? column.cell(row) : (column.of(row) ?? "–")}</div>
                    </td>
                  `,
                )}
              </tr>
            `,
          )}
        </tbody>
      </table>
    </div>
  `;
}

/** Rows without a value come last, whichever way the others go. */
function compare(column, one, other, down) {
  const [a, b] = [column.of(one), column.of(other)];
  if (a === null || a === undefined) return b === null || b === undefined ? 0 : 1;
  if (b === null || b === undefined) return -1;
  const order =
    typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : Number(a) - Number(b);
  return down ? -order : order;
}
