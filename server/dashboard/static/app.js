// The frame of the pages: navigation, the reader's session, and which page the address names.

import { html, render, useEffect, useState } from "./vendor/preact-htm.js";
import { AlertsPage } from "./pages/alerts.js";
import { AuditPage } from "./pages/audit.js";
import { DevicePage } from "./pages/device.js";
import { FleetPage } from "./pages/fleet.js";
import { ModelsPage } from "./pages/models.js";
import { RolloutsPage } from "./pages/rollouts.js";
import { TrainingPage } from "./pages/training.js";
import { Badge, Command, Icon, Said, say } from "./parts.js";
import { mayAct, now, signIn, signOut, useFacts, whoIsThere } from "./server.js";
import { plural } from "./words.js";

const PAGES = [
  { name: "fleet", label: "Fleet", page: FleetPage },
  { name: "models", label: "Models", page: ModelsPage },
  { name: "rollouts", label: "Roll-outs", page: RolloutsPage },
  { name: "training", label: "Training", page: TrainingPage },
  { name: "alerts", label: "Alerts", page: AlertsPage },
  { name: "audit", label: "Audit", page: AuditPage },
];

/** The words of the address after `#/`: the page's name, and what it is of. */
function address() {
  try {
    return location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  } catch {
    return ["fleet"]; // a lone % is no address
  }
}

function App() {
  const [words, setWords] = useState(address());
  const [who, setWho] = useState(undefined);
  const [trouble, setTrouble] = useState("");
  useEffect(() => {
    const moved = () => setWords(address());
    const left = () => setWho(null);
    addEventListener("hashchange", moved);
    addEventListener("signed-out", left);
    return () => {
      removeEventListener("hashchange", moved);
      removeEventListener("signed-out", left);
    };
  }, []);
  useEffect(() => {
    const enter = async () => {
      try {
        const link = words[0] === "sign-in" ? words[1] : null;
        const session = link ? await signIn(link) : await whoIsThere();
        setTrouble("");
        setWho(session.who);
        if (link) history.replaceState(null, "", "#/fleet");
        if (link) setWords(["fleet"]);
      } catch (error) {
        setTrouble(error.message);
        setWho((await whoIsThere().catch(() => ({ who: null }))).who);
      }
    };
    enter();
  }, [words[0] === "sign-in" ? words[1] : ""]);
  if (who === undefined) return html`<div class="waiting" role="status">…</div>`;
  if (who === null) return html`<${SignedOut} trouble=${trouble} />`;
  return html`<${Frame} words=${words} who=${who} />`;
}

function Frame({ words, who }) {
  const name = words[0] === "device" ? "fleet" : words[0];
  const found = PAGES.find((one) => one.name === name) || PAGES[0];
  useEffect(() => {
    document.title = `${words[0] === "device" ? words[1] : found.label} · splitedge`;
    scrollTo(0, 0);
  }, [words.join("/")]);
  const leave = async () => {
    try {
      await signOut();
    } catch (error) {
      say(`You are still signed in: ${error.message}`); // the session lives on until it is ended
      return;
    }
    dispatchEvent(new Event("signed-out"));
  };
  return html`
    <nav aria-label="Pages">
      <a class="brand" href="#/fleet"><${Mark} /><span>splitedge</span></a>
      <div class="pages">
        ${PAGES.map(
          (one) => html`
            <a href="#/${one.name}" aria-current=${one === found ? "page" : null}>
              <${Icon} name=${one.name} /><span>${one.label}</span>
              ${one.name === "alerts" && html`<${OpenAlerts} />`}
            </a>
          `,
        )}
      </div>
      <${Person} who=${who} leave=${leave} />
    </nav>
    <main>
      <${Person} who=${who} leave=${leave} on="phone" />
      ${words[0] === "device" && words[1]
        ? html`<${DevicePage} key=${words[1]} id=${words[1]} />`
        : html`<${found.page} key=${found.name} of=${words[1]} />`}
    </main>
    <${Said} />
  `;
}

/** The number of open alerts that nobody has silenced, beside the page's name. */
function OpenAlerts() {
  const { facts } = useFacts("alerts", 10);
  const open = (facts || []).filter((one) => one.closed_at === null && !(one.silenced_until > now()));
  return open.length > 0 && html`<span class="count" title=${`${plural(open.length, "alert")} open`}>${open.length}</span>`;
}

const Person = ({ who, leave, on = "desk" }) => html`
  <div class=${`person on-${on}`}>
    <div class="who">
      <span title=${mayAct() ? "The audit log names your changes so" : "You see all pages, and change nothing"}>${who}</span>
      ${!mayAct() && html`<${Badge} title="For changes, ask for a link without --read-only">reading only<//>`}
    </div>
    <button class="plain" onClick=${leave} title="Sign out" aria-label="Sign out"><${Icon} name="out" /></button>
  </div>
`;

const Mark = () => html`
  <svg class="mark" viewBox="0 0 32 32" aria-hidden="true">
    <rect width="32" height="32" rx="8" />
    <path d="M7 11h7l4 10h7M18 11h7" />
    <circle cx="7" cy="11" r="2.4" /><circle class="exit" cx="25" cy="11" r="2.4" /><circle cx="25" cy="21" r="2.4" />
  </svg>
`;

const SignedOut = ({ trouble }) => html`
  <main class="door">
    <${Mark} />
    <h1>splitedge</h1>
    ${trouble && html`<div class="notice bad" role="alert">${trouble}</div>`}
    <p>You are not signed in. Open the link that <b>splitedge server run</b> printed when it started, or ask for another on the machine of the server:</p>
    <${Command} text="splitedge server dashboard-link --state splitedge-server" />
    <p class="soft">Give <b>--state</b> the folder of your server. A link signs in one person, once.</p>
  </main>
`;

render(html`<${App} />`, document.getElementById("app"));
