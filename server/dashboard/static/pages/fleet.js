// The fleet: every device in a line, what waits for the operator, and how the next device joins.

import { html, useState } from "../vendor/preact-htm.js";
import { Lines } from "../charts.js";
import { Action, Badge, Card, Command, Dialog, Empty, Figure, Stale, Table, Waiting, say } from "../parts.js";
import { act, inState, mayAct, now, useFacts } from "../server.js";
import { ago, bytes, fallbackShare, ms, number, percent, plural, short } from "../words.js";

const TONES = { online: "good", offline: "bad", never: "plain", waiting: "warn", revoked: "faint" };
const RANKS = ["waiting", "offline", "online", "never", "revoked"];

export const Presence = ({ of }) => html`<span class="dot ${TONES[of]}" title=${of}></span>`;

// devices from which on the page is read less often: a device sends a heartbeat every 30 s
const MANY = 100;
const pause = (facts) => (facts && facts.devices.length > MANY ? 6 : 3);

export function FleetPage() {
  const { facts, error, reload } = useFacts("fleet", pause);
  const [text, setText] = useState("");
  const [fleet, setFleet] = useState("");
  const [adding, setAdding] = useState(false);
  if (!facts) return html`<${Waiting} error=${error} />`;
  const joined = facts.devices.filter((one) => one.presence !== "waiting");
  const waiting = facts.devices.filter((one) => one.presence === "waiting");
  if (!facts.devices.length) return html`<${First} facts=${facts} />`;
  const fleets = [...new Set(joined.map((one) => one.fleet))];
  const shown = joined.filter((one) => (!fleet || one.fleet === fleet) && fits(one, text));
  return html`
    <div class="heading">
      <h1>Fleet</h1>
      ${mayAct() && html`<button class="main push" onClick=${() => setAdding(true)}>Add a device</button>`}
    </div>
    <${Stale} error=${error} />
    ${adding && html`<${AddDevice} facts=${facts} onClose=${() => setAdding(false)} />`}
    <${Sums} devices=${joined} />
    <${Answers} />
    ${waiting.length > 0 && html`<${Approvals} devices=${waiting} onDone=${reload} />`}
    <${Card}>
      <div class="filters">
        <input type="search" placeholder="Find a device, model or state" aria-label="Find" value=${text}
          onInput=${(event) => setText(event.target.value)} />
        ${fleets.length > 1 &&
        html`<select aria-label="Fleet" value=${fleet} onChange=${(event) => setFleet(event.target.value)}>
          <option value="">all fleets</option>
          ${fleets.map((one) => html`<option value=${one}>${one}</option>`)}
        </select>`}
        <span class="soft push">${plural(shown.length, "device")}</span>
      </div>
      <${Table} label="Devices" columns=${COLUMNS} rows=${shown} keyOf=${(one) => one.id} />
      ${!shown.length && html`<p class="soft center">No device fits.</p>`}
    <//>
  `;
}

const fits = (device, text) =>
  text
    .toLowerCase()
    .split(/\s+/)
    .every((word) =>
      [device.id, device.title, device.fleet, device.presence, device.runs, device.hardware, ...(device.tags || [])]
        .concat(device.refused ? "refused" : [], device.pinned ? "pinned" : [], device.offloading ? [] : "offloading off")
        .some((one) => one && one.toLowerCase().includes(word)),
    );

const COLUMNS = [
  {
    label: "Device",
    of: (one) => one.title || one.id,
    cell: (one) => html`
      <a class="name" href="#/device/${one.id}"><${Presence} of=${one.presence} />${one.title || one.id}</a>
      ${one.title && html`<div class="soft small">${one.id}</div>`}
      <div class="soft small">${one.hardware.split(",")[0]}</div>
      ${one.tags.map((tag) => html`<${Badge}>${tag}<//> `)}
    `,
  },
  { label: "Fleet", wide: true, of: (one) => one.fleet },
  { label: "Model", wide: true, of: (one) => one.runs, cell: (one) => html`<${Bundle} device=${one} />` },
  { label: "Depth", of: (one) => one.depth, right: true },
  { label: "Memory", of: (one) => one.memory_bytes, cell: (one) => bytes(one.memory_bytes), right: true },
  { label: "Exits", of: (one) => one.exits, cell: (one) => short(one.exits), right: true },
  { label: "Offloads", of: (one) => one.offloads, cell: (one) => short(one.offloads), right: true },
  {
    label: "Fallbacks",
    of: (one) => one.fallbacks,
    cell: (one) => html`<span class=${one.fallbacks ? "warn-text" : ""}>${short(one.fallbacks)}</span>`,
    right: true,
  },
  { label: "Latency", of: (one) => one.latency_ms, cell: (one) => ms(one.latency_ms), right: true },
  {
    label: "Last seen",
    wide: true,
    of: (one) => one.last_seen,
    cell: (one) => html`${one.presence === "offline" && html`<span class="bad-text">offline</span>, `}${ago(one.last_seen)}`,
    right: true,
  },
];

/** What a device runs, and what it should run where that is something else. */
export const Bundle = ({ device }) => html`
  <span>${device.runs || html`<span class="soft">not reported</span>`}</span>
  ${device.pinned && html` <${Badge} title=${`Pinned to ${device.pinned}`}>pinned<//>`}
  ${!device.offloading && html` <${Badge} tone="warn" title="Its offloading is switched off: it answers every input alone">offloading off<//>`}
  ${device.refused && html` <${Badge} tone="bad" title=${device.why}>refused ${device.refused}<//>`}
  ${moving(device) && html`<div class="small soft">→ ${device.wants}</div>`}
`;

/** Whether a device should run something else than it does. */
export const moving = (device) =>
  Boolean(device.wants) && device.wants !== device.runs && !(device.runs || "").startsWith(`${device.wants}/`);

function Sums({ devices }) {
  const there = devices.filter((one) => one.presence !== "revoked");
  const online = there.filter((one) => one.presence === "online").length;
  const sum = (key) => there.reduce((total, one) => total + (one[key] || 0), 0);
  const [exits, offloads, fallbacks] = [sum("exits"), sum("offloads"), sum("fallbacks")];
  const answers = exits + offloads + fallbacks;
  const lost = fallbackShare(offloads, fallbacks);
  const behind = there.filter(moving).length;
  const refused = there.filter((one) => one.refused).length;
  return html`
    <div class="figures">
      <${Figure} label="Online" value=${`${number(online)} of ${number(there.length)}`} tone=${online < there.length ? "" : "good"}
        note=${there.length - online ? `${plural(there.length - online, "device")} away` : "all devices are there"} />
      <${Figure} label="Answered on the device" value=${answers ? percent(exits / answers) : "–"}
        note=${answers ? `${short(answers)} answers in an hour` : "no answers in an hour"} />
      <${Figure} label="Fallbacks" value=${percent(lost)} tone=${lost > 0.05 ? "warn" : ""}
        note=${lost === null ? "nobody asked the server" : `${short(fallbacks)} of ${short(offloads + fallbacks)} queries`} />
      <${Figure} label="On the way to a version" value=${number(behind)} tone=${refused ? "bad" : ""}
        note=${refused ? `${plural(refused, "device")} refused a bundle` : "no bundle was refused"} />
    </div>
  `;
}

/** Answers of all devices in the last hour, by source. */
function Answers() {
  const { facts } = useFacts("history?since_s=3600", 15);
  // devices tell of their answers every 30 s: the newest minutes are not whole yet, nor is the one with which the hour begins
  const whole = (facts || []).filter((one) => one.at <= now() - 30 && one.at - one.span_s >= now() - 3600);
  if (whole.length < 2) return null;
  const rate = (key) => whole.map((one) => (60 * one[key]) / one.span_s);
  return html`
    <${Card} title="Answers a minute" note="all devices, the last hour">
      <${Lines} x=${whole.map((one) => one.at)} time=${true} shown=${short} least=${0} height=${150} label="Answers a minute of all devices over the last hour, by source"
        lines=${[
          { label: "exits", colour: "accent", values: rate("exits") },
          { label: "offloads", colour: "third", values: rate("offloads") },
          { label: "fallbacks", colour: "bad", values: rate("fallbacks") },
        ]} />
    <//>
  `;
}

const Approvals = ({ devices, onDone }) => html`
  <${Card} title=${`${plural(devices.length, "device")} waiting for approval`} tone="warn">
    ${devices.map(
      (one) => html`
        <div class="row" key=${one.id}>
          <div><b>${one.id}</b> <span class="soft">${one.hardware}, fleet ${one.fleet}</span></div>
          <span class="push buttons">
            <${Action} label="Reject" tone="bad" path=${`devices/${one.id}/reject`} onDone=${onDone}
              question=${`${one.id} is refused for good. To join later, it needs a new token.`} />
            <${Action} label="Approve" tone="main" path=${`devices/${one.id}/approve`} onDone=${onDone}
              question=${`${one.id} joins the fleet ${one.fleet}, and gets its model.`} />
          </span>
        </div>
      `,
    )}
  <//>
`;

/** The address by which a device reaches this server, as far as this page knows it. */
const serverUrl = () => location.href.replace(/#.*/, "").replace(/\/$/, "");

const enrol = (token) => `splitedge agent enroll --server ${serverUrl()} --state device --token ${token}`;

/** A server without devices: the commands that bring the first one. */
function First({ facts }) {
  const [made, setMade] = useState(false);
  return html`
    <div class="heading"><h1>Fleet</h1></div>
    <${Empty} title="No devices yet">
      <ol>
        <li><p>Install splitedge on the device, in a checkout of this server's release (version ${facts.version}):</p><${Command} text="pip install -c constraints.txt '.[serve]'" /></li>
        <li>
          <p>Make a token, which lets one device in, once, within an hour. On the machine of the server, this command makes one, too:</p>
          <${Command} text=${`splitedge server token create --state ${inState()}`} />
          ${mayAct() && html`<${TokenMaker} fleets=${[]} onMade=${() => setMade(true)} />`}
        </li>
        ${!made && html`<li><p>Enrol the device with the token, on the device:</p><${Command} text=${enrol("TOKEN")} /></li>`}
        <li><p>Start the agent:</p><${Command} text="splitedge agent run --state device --serve 127.0.0.1:8080" /></li>
      </ol>
      ${facts.local &&
      html`<p class="soft">This server listens on this machine only, so the device is this machine. For devices elsewhere, start the server with <b>--http</b>, <b>--tls-cert</b> and <b>--tls-key</b>.</p>`}
    <//>
  `;
}

const AddDevice = ({ facts, onClose }) => html`
  <${Dialog} title="Add a device" onClose=${onClose}>
    <p>A token lets one device in, once, within an hour. Then start it with <b>splitedge agent run --state device</b>.</p>
    <${TokenMaker} fleets=${facts.fleets.map((one) => one.fleet)} />
    <form method="dialog" class="buttons"><button>Close</button></form>
  <//>
`;

function TokenMaker({ fleets, onMade }) {
  const [made, setMade] = useState(null);
  const [fleet, setFleet] = useState(fleets[0] || "default");
  const make = async () => {
    try {
      setMade(await act("tokens", { fleet }));
      if (onMade) onMade();
    } catch (error) {
      say(error.message);
    }
  };
  if (made) {
    return html`
      <p>Type this on the device, in the fleet ${made.fleet}:</p>
      <${Command} text=${enrol(made.token)} />
      <p class="soft small">The token is shown once. Behind a certificate of your own, add --ca and its file.</p>
    `;
  }
  return html`
    <div class="row">
      <label>Fleet <input value=${fleet} pattern="[a-z0-9\\-]{1,63}" onInput=${(event) => setFleet(event.target.value)} list="fleets" /></label>
      <datalist id="fleets">${fleets.map((one) => html`<option value=${one}></option>`)}</datalist>
      <button class="main" onClick=${make}>Make a token</button>
    </div>
  `;
}
