// One device: what it answers and how sure it is, its link, its bundles, its events, and its orders.

import { html, useState } from "../vendor/preact-htm.js";
import { Histogram, Lines } from "../charts.js";
import { Action, Badge, Card, Figure, Pairs, Question, Stale, Table, Waiting } from "../parts.js";
import { act, mayAct, useFacts } from "../server.js";
import { ago, bytes, clock, fallbackShare, ms, number, percent, plural, short } from "../words.js";
import { Events } from "./audit.js";
import { Presence, moving } from "./fleet.js";

export function DevicePage({ id }) {
  const { facts, error, reload } = useFacts(`devices/${encodeURIComponent(id)}`);
  if (!facts) return html`<${Back} /><${Waiting} error=${error} />`;
  const { line } = facts;
  return html`
    <${Back} />
    <div class="heading">
      <h1><${Presence} of=${line.presence} />${line.title || line.id}</h1>
      <span class="soft">${line.title ? `${line.id}, ${line.hardware}` : line.hardware}</span>
      <span class="push buttons"><${Buttons} facts=${facts} onDone=${reload} /></span>
    </div>
    <${Stale} error=${error} />
    <${Troubles} facts=${facts} />
    <${Sums} line=${line} />
    <${History} id=${id} running=${facts.running} />
    <div class="columns">
      <${Now} facts=${facts} onDone=${reload} />
      <${About} facts=${facts} />
    </div>
    ${Object.keys(facts.refused).length > 0 && html`<${Refused} facts=${facts} onDone=${reload} />`}
    <${Measured} facts=${facts} onDone=${reload} />
    <${Card} title="Events" note="from the audit log, newest first">
      <${Events} entries=${facts.events} />
    <//>
  `;
}

const Back = () => html`<a class="back" href="#/fleet">← Fleet</a>`;

function Buttons({ facts, onDone }) {
  const { id, presence } = facts.line;
  if (presence === "revoked" || !mayAct()) return null;
  if (presence === "waiting") {
    return html`
      <${Action} label="Reject" tone="bad" path=${`devices/${id}/reject`} onDone=${onDone} question=${`${id} is refused for good.`} />
      <${Action} label="Approve" tone="main" path=${`devices/${id}/approve`} onDone=${onDone} question=${`${id} joins the fleet.`} />
    `;
  }
  return html`
    <${Rename} line=${facts.line} onDone=${onDone} />
    <${Action} label="New credential" path=${`devices/${id}/rotate`} onDone=${onDone}
      question=${`${id} replaces its credential, now or when it is back. The old one works until the new one does.`} />
    <${Action} label="Revoke" tone="bad" path=${`devices/${id}/revoke`} onDone=${onDone}
      question=${`${id} is shut out at once and for good. To join again, it must be enrolled with a new token.`} />
  `;
}

/** A button that asks for what people call the device. */
function Rename({ line, onDone }) {
  const [title, setTitle] = useState(null);
  return html`
    <button onClick=${() => setTitle(line.title || "")}>Rename</button>
    ${title !== null &&
    html`<${Question} title="Rename" yes="Rename" question=${`Lists and alerts show this title. ${line.id} stays the name by which commands mean the device.`}
      act=${() => act(`devices/${line.id}/rename`, { title })} onClose=${() => setTitle(null)} onDone=${onDone}>
      <label>Title <input value=${title} maxlength="63" autofocus onInput=${(event) => setTitle(event.target.value)} /></label>
    <//>`}
  `;
}

function Troubles({ facts }) {
  const { line, orders } = facts;
  return html`
    ${line.presence === "revoked" && html`<div class="notice">Revoked ${ago(facts.revoked_at)}.</div>`}
    ${line.presence === "waiting" && html`<div class="notice warn">It enrolled ${ago(facts.enrolled_at)} and waits for your approval.</div>`}
    ${!line.offloading && html`<div class="notice warn">Its offloading is switched off, on the device or in Home Assistant: it answers every input alone. On the device, splitedge agent offloading on switches it on.</div>`}
    ${line.refused && html`<div class="notice bad">It refused ${line.refused}: ${line.why}</div>`}
    ${orders.map((one) => html`<div class="notice">Ordered ${ago(one.asked_at)}, not done yet: ${one.op} ${one.argument}</div>`)}
  `;
}

const Sums = ({ line }) => html`
  <div class="figures">
    <${Figure} label="Last seen" value=${ago(line.last_seen)} note=${line.presence} tone=${{ online: "good", offline: "bad" }[line.presence] || ""} />
    <${Figure} label="An answer on the device" value=${ms(line.latency_ms)} note="median" />
    <${Figure} label="To the server and back" value=${ms(line.round_trip_ms)} note="a small message" />
    <${Figure} label="Memory free" value=${bytes(line.memory_bytes)} note="on the device" />
  </div>
`;

const WINDOWS = [
  [3600, "hour"],
  [86400, "day"],
  [30 * 86400, "30 days"],
];

/** Which answers a histogram counts: after an update it begins anew. */
const noteOf = ({ bundle, since }) =>
  since === null ? `answers with ${bundle}` : `answers since the update to ${bundle}, ${ago(since)}`;

/** Charts of what the device did: how sure it was, where its answers came from, how fast they were. */
function History({ id, running }) {
  const [since, setSince] = useState(3600);
  const { facts, error } = useFacts(`devices/${encodeURIComponent(id)}/history?since_s=${since}`, 5);
  const answers = facts ? facts.exits + facts.offloads + facts.fallbacks : 0;
  const points = facts ? facts.points : [];
  const x = points.map((one) => one.at);
  const share = (one) => {
    const total = one.exits + one.offloads + one.fallbacks;
    return total ? one.exits / total : null;
  };
  const unit = running ? running.gate : "of the gate";
  return html`
    <div class="heading">
      <h2>Answers</h2>
      <div class="tabs" role="tablist" aria-label="Time">
        ${WINDOWS.map(
          ([seconds, name]) => html`<button role="tab" aria-selected=${seconds === since} onClick=${() => setSince(seconds)}>${name}</button>`,
        )}
      </div>
      ${facts &&
      html`<span class="soft push">
        ${answers
          ? `${short(answers)} answers: ${percent(facts.exits / answers)} exits; of ${short(facts.offloads + facts.fallbacks)} queries to the server, ${percent(fallbackShare(facts.offloads, facts.fallbacks))} fallbacks`
          : "no answers in this time"}
      </span>`}
    </div>
    ${facts ? html`<${Stale} error=${error} />` : html`<${Waiting} error=${error} />`}
    ${facts &&
    !points.length &&
    html`<p class="soft">No heartbeat came in this time. A device tells of its answers every 30 seconds while its agent runs.</p>`}
    ${points.length > 0 &&
    html`
      <div class="columns">
        <${Card} title="Uncertainty" note=${facts.uncertainty ? noteOf(facts.uncertainty) : ""}>
          ${facts.uncertainty
            ? html`<${Histogram} edges=${facts.uncertainty.edges} counts=${facts.uncertainty.counts} threshold=${facts.threshold} unit=${unit}
                heldOut=${facts.uncertainty.held_out} of=${facts.uncertainty.bundle} />`
            : html`<p class="soft">Its agent is of an older release, which does not tell how sure its answers are.</p>`}
        <//>
        <${Card} title="Answered on the device">
          <${Lines} x=${x} time=${true} shown=${percent} least=${0} most=${1} height=${210} label="Share of answers that exit, over time"
            lines=${[{ label: "exit rate", colour: "accent", values: points.map(share) }]} />
        <//>
        <${Card} title="Latency">
          <${Lines} x=${x} time=${true} shown=${ms} least=${0} label="Latency of answers over time"
            lines=${[
              { label: "device, median", colour: "accent", values: points.map((one) => one.device_ms) },
              { label: "device, 95 %", colour: "third", values: points.map((one) => one.device_high_ms) },
              { label: "server, median", colour: "second", values: points.map((one) => one.server_ms) },
            ]} />
        <//>
        <${Card} title="Link and memory">
          <${Lines} x=${x} time=${true} shown=${ms} least=${0} label="Round trip to the server over time"
            lines=${[{ label: "round trip", colour: "second", values: points.map((one) => one.round_trip_ms) }]} height=${92} />
          <${Lines} x=${x} time=${true} shown=${bytes} least=${0} label="Free memory over time"
            lines=${[{ label: "memory free", colour: "third", values: points.map((one) => one.memory_bytes) }]} height=${92} />
        <//>
      </div>
      <${Promises} facts=${facts} />
    `}
  `;
}

/** What the gate's controllers hold, where the device has them. */
function Promises({ facts }) {
  const { agreement_bound: bound, agreement_delta: delta } = facts;
  if (delta === null && facts.earned === null && !facts.restarts) return null;
  return html`
    <${Card} title="Gate">
      <${Pairs} of=${[
        delta !== null && [
          "disagreement",
          html`${bound === null ? "no bound holds yet" : `at most ${percent(bound)}, with 95 % confidence`}
            <span class="soft"> (limit ${percent(delta)}, ${number(facts.audits)} audits)</span>
            ${bound !== null && bound > delta && html` <${Badge} tone="bad">above the limit<//>`}`,
        ],
        facts.earned !== null && ["budget", `${number(facts.spent)} spent of ${number(facts.earned)}`],
        facts.restarts > 0 && ["agent started", `${plural(facts.restarts, "time")} in this time`],
      ]} />
    <//>
  `;
}

const Now = ({ facts }) => {
  const { line, running } = facts;
  return html`
    <${Card} title="Bundle">
      <${Pairs} of=${[
        ["runs", line.runs || "not reported"],
        ["should run", html`${line.wants || "–"} ${moving(line) && html`<${Badge} tone="warn">on the way<//>`}`],
        ["chosen by", line.pinned ? `you: pinned to ${line.pinned}` : "the fleet's rule"],
        ["fleet", line.fleet],
        ["offloading", line.offloading ? "on" : html`<${Badge} tone="warn">off<//>`],
        running && ["gate", `${running.gate}, threshold ${Number(running.threshold.toFixed(4))}`],
        running && ["download", bytes(running.size_bytes)],
      ]} />
    <//>
  `;
};

const About = ({ facts }) => {
  const { profile } = facts;
  const link = facts.conditions && facts.conditions.bandwidth_mbps;
  return html`
    <${Card} title="Hardware">
      <${Pairs} of=${[
        ["name", profile.name],
        ["processor", `${profile.cores} × ${profile.arch}`],
        ["memory", bytes(profile.memory_total_bytes)],
        profile.accelerator && ["accelerator", profile.accelerator],
        profile.compute_score_gflops && ["one core", `${Number(profile.compute_score_gflops.toFixed(1))} GFLOP/s`],
        link && ["link", `${Number(link.toFixed(1))} Mbit/s`],
        ["enrolled", html`<span title=${clock(facts.enrolled_at)}>${ago(facts.enrolled_at)}</span>`],
      ]} />
    <//>
  `;
};

const Refused = ({ facts, onDone }) => html`
  <${Card} title="Bundles that it refused" note="it does not try them again by itself" tone="bad">
    ${Object.entries(facts.refused).map(
      ([bundle, why]) => html`
        <div class="row" key=${bundle}>
          <div><b>${bundle}</b><div class="soft small">${why}</div></div>
          <span class="push">
            <${Action} label="Let it try again" path=${`devices/${facts.line.id}/lift`} body=${{ bundle }} onDone=${onDone}
              question=${`${facts.line.id} tries ${bundle} again, now or when it is back.`} />
          </span>
        </div>
      `,
    )}
  <//>
`;

function Measured({ facts, onDone }) {
  const { line } = facts;
  const measured = new Map(facts.measured.map((one) => [one.bundle, one]));
  const left = new Map(facts.left.map((one) => [one.bundle, one]));
  const rows = facts.choices.map((bundle) => ({ bundle, taken: measured.get(bundle), left: left.get(bundle) }));
  const fixed = (bundle) => line.pinned === bundle;
  const columns = [
    {
      label: "Bundle",
      of: (one) => one.bundle,
      cell: (one) => html`
        ${one.bundle}
        ${one.bundle === line.runs && html` <${Badge} tone="good">runs<//>`}
        ${fixed(one.bundle) && html` <${Badge}>pinned<//>`}
        ${one.left && html` <${Badge} tone="warn" title=${one.left.why}>left: ${one.left.kind}<//>`}
      `,
    },
    { label: "One answer", of: (one) => one.taken?.graphs.exit.latency_ms, cell: (one) => ms(one.taken?.graphs.exit.latency_ms), right: true },
    { label: "Memory", of: (one) => one.taken?.memory_bytes, cell: (one) => bytes(one.taken?.memory_bytes), right: true },
    {
      label: "",
      of: () => null,
      right: true,
      cell: (one) =>
        line.presence !== "revoked" && line.presence !== "waiting" &&
        (fixed(one.bundle)
          ? html`<${Action} label="Unpin" path=${`devices/${line.id}/unpin`} onDone=${onDone}
              question="The fleet's rule chooses the bundle again, by what the device measured." />`
          : html`<${Action} label="Pin" path=${`devices/${line.id}/pin`} body=${{ bundle: one.bundle }} onDone=${onDone}
              question=${`${line.id} runs ${one.bundle} until you unpin it, whatever it measures.`} />`),
    },
  ];
  return html`
    <${Card} title="Bundles for this device" note="measured there">
      ${rows.length
        ? html`<${Table} label="Bundles" columns=${columns} rows=${rows} keyOf=${(one) => one.bundle} />`
        : html`<p class="soft">Its fleet has no model yet.</p>`}
    <//>
  `;
}
