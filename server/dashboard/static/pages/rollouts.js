// The roll-outs: how far each is, what it waits for, the health of its share, and its devices.

import { html, useState } from "../vendor/preact-htm.js";
import { Action, Badge, Card, Command, Dialog, Empty, Pairs, Stale, Table, Waiting, say } from "../parts.js";
import { act, inState, mayAct, useFacts } from "../server.js";
import { ago, lasting, ms, number, percent, plural } from "../words.js";

const TONES = { running: "good", paused: "warn", done: "plain", failed: "bad", aborted: "warn" };
const LIVE = ["running", "paused"];

export function RolloutsPage() {
  const { facts, error, reload } = useFacts("rollouts");
  const [starting, setStarting] = useState(false);
  if (!facts) return html`<${Waiting} error=${error} />`;
  return html`
    <div class="heading">
      <h1>Roll-outs</h1>
      ${facts.versions.length > 0 && mayAct() && html`<button class="main push" onClick=${() => setStarting(true)}>Start a roll-out</button>`}
    </div>
    <${Stale} error=${error} />
    ${starting && html`<${Start} facts=${facts} onClose=${() => setStarting(false)} onDone=${reload} />`}
    ${facts.rollouts.map((one) => html`<${Rollout} key=${one.id} rollout=${one} onDone=${reload} />`)}
    ${facts.more > 0 && html`<p class="soft center">${plural(facts.more, "older roll-out")}: splitedge server rollout list</p>`}
    ${!facts.rollouts.length && html`<${None} />`}
  `;
}

const None = () => html`
  <${Empty} title="No roll-out yet">
    <p>A roll-out moves a version to a share of the devices, watches how they do, and goes on to the next share, or back by itself. Without one, the active version of a model goes to all devices of its fleets at once.</p>
    <${Command} text=${`splitedge server rollout start my-model 2 --share 10% --then 50%,100% --health "fallback<5%" --wait 10m --state ${inState()}`} />
  <//>
`;

function Rollout({ rollout, onDone }) {
  const path = `rollouts/${rollout.id}`;
  const live = LIVE.includes(rollout.state);
  const judged = rollout.state === "running" && rollout.health.length > 0;
  const buttons =
    live &&
    html`<span class="buttons">
      ${rollout.state === "running"
        ? html`<${Action} label="Pause" path=${`${path}/pause`} onDone=${onDone} question="It stays where it is: its devices keep the version, and no more devices move." />`
        : html`<${Action} label="Resume" path=${`${path}/resume`} onDone=${onDone} question="It goes on from where it is." />`}
      <${Action} label="Abort" tone="bad" path=${`${path}/abort`} onDone=${onDone} question=${`It ends, and its devices go back to what they ran before: ${rollout.base}.`} />
    </span>`;
  return html`
    <${Card} title=${rollout.version} note=${`${rollout.selection}, by ${rollout.who}, started ${ago(rollout.started_at)}`} actions=${buttons} tone=${rollout.state === "failed" ? "bad" : ""}>
      <div class="row">
        <${Badge} tone=${TONES[rollout.state] || "plain"}>${rollout.state}<//>
        <${Steps} rollout=${rollout} />
        <span class="soft push">${number(rollout.taken)} of ${plural(rollout.joined, "device")} of the share ${live || rollout.state === "done" ? "run" : "ran"} it</span>
      </div>
      ${rollout.reason && html`<div class="notice ${rollout.state === "failed" ? "bad" : ""}">${rollout.reason}</div>`}
      ${rollout.waits && html`<p class="soft">It waits for ${rollout.waits}.</p>`}
      <div class="columns">
        <${Pairs} of=${[
          ["from", rollout.base],
          ["watched for", `${lasting(rollout.wait_s)} at each share`],
          judged && ["answers", `${number(rollout.answers)} of the share, ${number(rollout.answers_min)} are needed`],
          !judged && rollout.health.length > 0 && ["health", rollout.health.map((one) => one.condition).join(", ")],
          rollout.ended_at !== null && ["ended", ago(rollout.ended_at)],
        ]} />
        ${judged && html`<${Pairs} of=${rollout.health.map((one) => [
          one.condition,
          html`<${Badge} tone=${{ good: "good", worse: "bad" }[one.verdict] || "plain"}>${one.verdict}<//>
            ${one.value !== null && html` <span class="soft">${shown(one, one.value)}${one.limit !== null && `, limit ${shown(one, one.limit)}`}</span>`}`,
        ])} />`}
      </div>
      ${rollout.joined > 0 && html`<${Devices} rollout=${rollout} live=${live} />`}
    <//>
  `;
}

/** The devices of a roll-out's share; of one that is over they are read once they are looked at. */
function Devices({ rollout, live }) {
  const [open, setOpen] = useState(live);
  return html`
    <details open=${open} onToggle=${(event) => setOpen(event.currentTarget.open)}>
      <summary>Devices</summary>
      ${open && (rollout.members.length ? html`<${Members} rollout=${rollout} />` : html`<${Past} id=${rollout.id} />`)}
    </details>
  `;
}

function Past({ id }) {
  const { facts, error } = useFacts(`rollouts/${id}`, 30);
  return facts ? html`<${Members} rollout=${facts} />` : html`<${Waiting} error=${error} />`;
}

const Members = ({ rollout }) => html`
  <${Table} label=${`Devices of roll-out ${rollout.id}`} columns=${COLUMNS} rows=${rollout.members} keyOf=${(one) => one.device} />
`;

const shown = (one, value) => (/latency|ms/.test(one.condition) ? ms(value) : percent(value));

/** The shares of a roll-out, with those that are reached. */
const Steps = ({ rollout }) => html`
  <span class="steps" role="img" aria-label=${`At ${percent(rollout.share)} of ${rollout.shares.map((one) => percent(one)).join(", ")}`}>
    ${rollout.shares.map((one) => html`<span class=${one <= rollout.share ? "on" : ""}>${percent(one)}</span>`)}
  </span>
`;

const STATES = { "runs it": "good", failed: "bad", "going back": "warn", waiting: "plain", back: "plain", left: "plain" };

const COLUMNS = [
  { label: "Device", of: (one) => one.device, cell: (one) => html`<a class="name" href="#/device/${one.device}">${one.device}</a>` },
  { label: "State", of: (one) => one.state, cell: (one) => html`<${Badge} tone=${STATES[one.state]}>${one.state}<//>` },
  { label: "Share", of: (one) => one.share, cell: (one) => percent(one.share), right: true },
  { label: "Ran before", wide: true, of: (one) => one.before },
  { label: "Runs", wide: true, of: (one) => one.runs },
  { label: "Why", wide: true, of: (one) => one.why, cell: (one) => (one.why ? html`<span class="bad-text">${one.why}</span>` : null) },
  { label: "Last seen", wide: true, of: (one) => one.last_seen, cell: (one) => ago(one.last_seen), right: true },
];

const HEALTH =
  "Conditions with commas between them, such as fallback<5%, exit>60%, agreement>0.97, latency<80ms. With 1.2x in the" +
  " place of a number, the share is compared with the devices that stayed. If a condition does not hold, all devices go back.";

function Start({ facts, onClose, onDone }) {
  const [version, setVersion] = useState(facts.versions.at(-1));
  const [shares, setShares] = useState("10, 50, 100");
  const [health, setHealth] = useState("fallback<5%");
  const [minutes, setMinutes] = useState("10");
  const [fleet, setFleet] = useState("");
  const [error, setError] = useState("");
  const go = async (event) => {
    event.preventDefault();
    const [model, number] = version.split("/");
    const body = {
      model,
      version: Number(number),
      shares: shares.split(/[,%\s]+/).filter(Boolean).map((one) => Number(one) / 100),
      health,
      wait_s: 60 * Number(minutes),
      ...(fleet ? { fleet } : {}),
    };
    try {
      say((await act("rollouts", body)).done);
      onClose();
      onDone();
    } catch (refused) {
      setError(refused.message);
    }
  };
  const typed = (set) => (event) => set(event.target.value);
  return html`
    <${Dialog} title="Start a roll-out" onClose=${onClose}>
      ${error && html`<div class="notice bad" role="alert">${error}</div>`}
      <form onSubmit=${go}>
        <label>Version <select value=${version} onChange=${typed(setVersion)}>${facts.versions.map((one) => html`<option value=${one}>${one}</option>`)}</select></label>
        <label>Fleet <select value=${fleet} onChange=${typed(setFleet)}>
          <option value="">all that have the model</option>
          ${facts.fleets.map((one) => html`<option value=${one}>${one}</option>`)}
        </select></label>
        <label>Shares in % <input value=${shares} onInput=${typed(setShares)} /></label>
        <label>Health <input value=${health} onInput=${typed(setHealth)} aria-describedby="health" /></label>
        <p class="soft small" id="health">${HEALTH}</p>
        <label>Minutes at each share <input type="number" min="0" value=${minutes} onInput=${typed(setMinutes)} /></label>
        <div class="buttons">
          <button type="button" onClick=${onClose}>Cancel</button>
          <button class="main">Start</button>
        </div>
      </form>
    <//>
  `;
}
