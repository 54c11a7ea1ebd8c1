// The trainings: rounds as they end, with accuracy, loss, bytes, and who was missing and why.

import { html } from "../vendor/preact-htm.js";
import { Lines } from "../charts.js";
import { Badge, Card, Command, Empty, Figure, Stale, Table, Waiting } from "../parts.js";
import { inState, useFacts } from "../server.js";
import { ago, bytes, lasting, number, percent } from "../words.js";

const TONES = { running: "good", finished: "plain", stopped: "warn" };
const SHOWN = 50;

export function TrainingPage({ of }) {
  const { facts, error } = useFacts(of ? `training?of=${encodeURIComponent(of)}` : "training");
  if (!facts) return html`<${Waiting} error=${error} />`;
  const shown = facts.find((one) => one.name === of) || facts[0];
  return html`
    <div class="heading"><h1>Training</h1></div>
    <${Stale} error=${error} />
    ${shown
      ? html`
          ${facts.length > 1 &&
          html`<div class="tabs" role="tablist" aria-label="Trainings">
            ${facts.map(
              (one) => html`<a role="tab" aria-selected=${one === shown} href="#/training/${one.name}">${one.name}</a>`,
            )}
          </div>`}
          <${Training} key=${shown.name} training=${shown} />
        `
      : html`<${None} />`}
  `;
}

const None = () => html`
  <${Empty} title="No training yet">
    <p>A training with your devices shows its rounds here as they end. A recipe says which method, network and data:</p>
    <${Command} text=${`splitedge train examples/recipes/supersfl-digits.toml --state ${inState()}`} />
  <//>
`;

function Training({ training }) {
  const { rounds, ended, bytes_up: up, bytes_down: down } = training.log;
  const last = rounds.at(-1);
  const measured = rounds.filter((one) => one.accuracy !== null).at(-1);
  const x = rounds.map((one) => one.round);
  return html`
    <div class="heading">
      <h2>${training.name}</h2>
      <${Badge} tone=${TONES[training.state]}>${training.state}<//>
      <span class="soft">${[training.method, training.dataset].filter(Boolean).join(" on ")}</span>
      <span class="soft push">${rounds.length ? `last round ${ago(training.changed_at)}` : "no round has ended yet"}</span>
    </div>
    <div class="figures">
      <${Figure} label="Rounds" value=${training.rounds_wanted ? `${number(ended)} of ${number(training.rounds_wanted)}` : number(ended)} note=${last ? `${lasting(last.seconds)} for the last` : ""} />
      <${Figure} label="Accuracy" value=${percent(measured?.accuracy)} note=${measured ? `after round ${measured.round}` : "not measured yet"} />
      <${Figure} label="Traffic" value=${bytes(up + down)} note=${`${bytes(up)} up, ${bytes(down)} down`} />
      <${Figure} label="In the last round" value=${last ? number(last.participants.length) : "–"} tone=${last && Object.keys(last.missing).length ? "warn" : ""}
        note=${last ? `${Object.keys(last.missing).length} missing` : ""} />
    </div>
    ${rounds.length > 0 &&
    html`
      <div class="columns">
        <${Card} title="Accuracy">
          <${Lines} x=${x} xLabel="round" shown=${percent} least=${0} label=${`Accuracy over ${rounds.length} rounds`}
            lines=${[{ label: "accuracy", colour: "accent", values: rounds.map((one) => one.accuracy) }]} />
        <//>
        <${Card} title="Loss">
          <${Lines} x=${x} xLabel="round" shown=${(value) => String(Number(value.toPrecision(3)))} label=${`Loss over ${rounds.length} rounds`}
            lines=${[{ label: "loss", colour: "second", values: rounds.map((one) => one.loss) }]} />
        <//>
        <${Card} title="Traffic of a round">
          <${Lines} x=${x} xLabel="round" shown=${bytes} least=${0} label="Bytes up and down in each round"
            lines=${[
              { label: "up", colour: "accent", values: rounds.map((one) => one.bytes_up) },
              { label: "down", colour: "third", values: rounds.map((one) => one.bytes_down) },
            ]} />
        <//>
        <${Card} title="Devices of a round">
          <${Lines} x=${x} xLabel="round" shown=${number} least=${0} label="Devices that took part and were missing in each round"
            lines=${[
              { label: "took part", colour: "accent", values: rounds.map((one) => one.participants.length) },
              { label: "missing", colour: "bad", values: rounds.map((one) => Object.keys(one.missing).length) },
            ]} />
        <//>
      </div>
    `}
    <${Card} title="Rounds" note=${rounds.length > SHOWN ? `the last ${SHOWN}` : ""}>
      ${rounds.length
        ? html`<${Table} label="Rounds" columns=${COLUMNS} rows=${rounds.slice(-SHOWN)} keyOf=${(one) => one.round} down=${true} />`
        : html`<p class="soft">No round has ended yet. The trainer waits for devices, or runs its first round.</p>`}
    <//>
  `;
}

const COLUMNS = [
  { label: "Round", of: (one) => one.round, cell: (one) => html`<b>${one.round}</b>` },
  { label: "Accuracy", of: (one) => one.accuracy, cell: (one) => percent(one.accuracy), right: true },
  { label: "Loss", of: (one) => one.loss, cell: (one) => (one.loss === null ? "–" : String(Number(one.loss.toPrecision(4)))), right: true },
  { label: "Up", of: (one) => one.bytes_up, cell: (one) => bytes(one.bytes_up), right: true },
  { label: "Down", of: (one) => one.bytes_down, cell: (one) => bytes(one.bytes_down), right: true },
  { label: "Time", of: (one) => one.seconds, cell: (one) => lasting(one.seconds), right: true },
  { label: "Took part", of: (one) => one.participants.length, right: true },
  {
    label: "Missing, and why",
    wide: true,
    of: (one) => Object.keys(one.missing).length,
    cell: (one) => html`
      ${Object.entries(one.missing).map(([name, why]) => html`<div><a href="#/device/${name}">${name}</a> <span class="soft">${why}</span></div>`)}
      ${Object.entries(one.refused).map(([name, why]) => html`<div class="bad-text">${name} refused: ${why}</div>`)}
    `,
  },
];
