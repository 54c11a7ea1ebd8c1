// The models: versions, who runs them, their operating curves, and which model each fleet has.

import { html, useState } from "../vendor/preact-htm.js";
import { OperatingCurve } from "../charts.js";
import { Action, Badge, Card, Command, Dialog, Empty, Pairs, Stale, Table, Waiting, say } from "../parts.js";
import { act, inState, mayAct, useFacts } from "../server.js";
import { ago, bytes, clock, percent, plural } from "../words.js";

export function ModelsPage() {
  const { facts, error, reload } = useFacts("models", 5);
  const { facts: moved } = useFacts("rollouts", 15);
  if (!facts) return html`<${Waiting} error=${error} />`;
  const names = [...new Set(facts.versions.map((one) => one.state.model))];
  const failed = new Map(((moved && moved.rollouts) || []).filter((one) => one.state === "failed").map((one) => [one.version, one.reason]));
  return html`
    <div class="heading"><h1>Models</h1></div>
    <${Stale} error=${error} />
    ${names.length
      ? names.map((name) => html`<${Model} key=${name} name=${name} facts=${facts} failed=${failed} onDone=${reload} />`)
      : html`<${None} />`}
    ${facts.fleets.length > 0 && names.length > 0 && html`<${Fleets} facts=${facts} onDone=${reload} />`}
  `;
}

const None = () => html`
  <${Empty} title="No model yet">
    <p>Make one of your own ONNX classifier, or train one. Write it into the server's folder of models, and it is published within seconds:</p>
    <${Command} text=${`splitedge adopt model.onnx --data images/ --name my-model --out ${inState("models")}`} />
    <${Command} text=${`splitedge export --run RUN --out ${inState("models")} --name my-model`} />
  <//>
`;

/** `failed`: why the roll-outs of versions failed, by version. */
function Model({ name, facts, failed, onDone }) {
  const versions = facts.versions.filter((one) => one.state.model === name);
  const active = versions.find((one) => one.state.active) || versions[0];
  const [chosen, setChosen] = useState(null);
  const shown = versions.find((one) => one.state.version === chosen) || active;
  const columns = [
    {
      label: "Version",
      of: (one) => one.state.version,
      cell: (one) => html`
        <button class="plain name" onClick=${() => setChosen(one.state.version)} aria-pressed=${one === shown}>
          ${name}/${one.state.version}
        </button>
        ${one.state.active && html` <${Badge} tone="good">active<//>`}
        ${failed.has(`${name}/${one.state.version}`) &&
        html` <${Badge} tone="bad" title=${failed.get(`${name}/${one.state.version}`)}>roll-out failed<//>`}
      `,
    },
    { label: "Published", wide: true, of: (one) => one.state.published_at, cell: (one) => html`<span title=${clock(one.state.published_at)}>${ago(one.state.published_at)}</span>` },
    { label: "Fleets", wide: true, of: (one) => one.state.fleets.join(", "), cell: (one) => one.state.fleets.join(", ") || "–" },
    { label: "Run by", of: (one) => one.state.run_by.length, cell: (one) => html`<${Who} names=${one.state.run_by} what=${`run ${name}/${one.state.version}`} />`, right: true },
    { label: "Wanted by", of: (one) => one.state.wanted_by.length, cell: (one) => html`<${Who} names=${one.state.wanted_by} what=${`should run ${name}/${one.state.version}`} />`, right: true },
    {
      label: "Refused by",
      of: (one) => one.state.refused_by.length,
      cell: (one) => html`<span class=${one.state.refused_by.length ? "bad-text" : ""}>
        <${Who} names=${one.state.refused_by.map((each) => each.device)} what=${`refused ${name}/${one.state.version}`} whys=${one.state.refused_by.map((each) => each.why)} />
      </span>`,
      right: true,
    },
    {
      label: "",
      of: () => null,
      right: true,
      cell: (one) =>
        !one.state.active &&
        html`<${Action} label="Activate" title=${`Activate ${name}/${one.state.version}`} path=${`models/${name}/activate`} body=${{ version: one.state.version }} onDone=${onDone}
          question=${activating(name, one.state.version, failed)} />`,
    },
  ];
  const before = versions
    .filter((one) => !one.state.active && one.state.activated_at !== null)
    .sort((a, b) => b.state.activated_at - a.state.activated_at)[0];
  const back =
    before &&
    html`<${Action} label="Roll back" title=${`Roll back to ${name}/${before.state.version}`} path=${`models/${name}/rollback`} onDone=${onDone}
      question=${`${name}/${before.state.version}, which was active before, becomes active again, and its fleets move back.`} />`;
  return html`
    <${Card} title=${name} note=${shown.class_names.length ? plural(shown.class_names.length, "class").replace("classs", "classes") : ""} actions=${back}>
      <${Table} label=${`Versions of ${name}`} columns=${columns} rows=${versions} keyOf=${(one) => one.state.version} down=${true} />
      ${shown.bundles.length > 0 && versions.length > 1 && html`<p class="soft small">The bundles of ${name}/${shown.state.version}. Click on another version to see its own.</p>`}
      ${shown.bundles.length > 0 && html`<${Bundles} key=${shown.state.version} bundles=${shown.bundles} />`}
    <//>
  `;
}

function activating(name, version, failed) {
  const moves = `Every fleet that follows ${name} moves to version ${version} within seconds.`;
  const why = failed.get(`${name}/${version}`);
  return why === undefined ? moves : `${moves} Its roll-out failed: ${why}`;
}

/** A count of devices that shows their names when it is clicked. */
function Who({ names, what, whys = [] }) {
  const [open, setOpen] = useState(false);
  if (!names.length) return "0";
  return html`
    <button class="plain link" onClick=${() => setOpen(true)}>${names.length}</button>
    ${open &&
    html`<${Dialog} title=${`${plural(names.length, "device")} ${what}`} onClose=${() => setOpen(false)}>
      <ul class="names">
        ${names.map((name, index) => html`<li><a href="#/device/${name}">${name}</a> <span class="soft small">${whys[index]}</span></li>`)}
      </ul>
      <form method="dialog" class="buttons"><button>Close</button></form>
    <//>`}
  `;
}

function Bundles({ bundles }) {
  const [name, setName] = useState(bundles[0].name);
  const shown = bundles.find((one) => one.name === name) || bundles[0];
  const point = pointAt(shown);
  // an adopted model has no labels: its exits are held against the whole model's answers
  const noted = (shown.parity.threshold || {}).curve_against;
  const right = noted === "the whole model" ? "agreement" : "accuracy";
  return html`
    <div class="tabs" role="tablist" aria-label="Bundles">
      ${bundles.map(
        (one) => html`
          <button role="tab" aria-selected=${one === shown} onClick=${() => setName(one.name)}>
            ${one.depth} ${one.depth === 1 ? "stage" : "stages"}${one.precision === "int8" ? ", int8" : ""}
          </button>
        `,
      )}
    </div>
    <div class="columns wide-left">
      ${shown.curve.length > 1
        ? html`<${OperatingCurve} key=${shown.name} curve=${shown.curve} threshold=${shown.threshold} unit=${shown.gate} right=${right} />`
        : html`<p class="soft">This bundle has no operating curve: it was exported without held-out data.</p>`}
      <${Pairs} of=${[
        ["bundle", shown.name],
        ["download", bytes(shown.size_bytes)],
        ["gate", shown.gate],
        ["threshold", String(Number(shown.threshold.toFixed(4)))],
        ["exits there", point ? percent(point.exit_rate) : "nothing exits"],
        point && [`${right} of exits`, percent(point.exit_accuracy)],
        point && [`${right} of all`, percent(point.accuracy)],
        ["figures of", "held-out samples"],
        ["features travel as", shown.codec],
      ]} />
    </div>
  `;
}

/** The point of the curve at the bundle's threshold, or below it; undefined where nothing exits. */
const pointAt = (bundle) =>
  [...bundle.curve].sort((a, b) => b.threshold - a.threshold).find((one) => one.threshold <= bundle.threshold + 1e-9);

function Fleets({ facts, onDone }) {
  const [changed, setChanged] = useState(null);
  const columns = [
    { label: "Fleet", of: (one) => one.fleet },
    { label: "Model", wide: true, of: (one) => one.model, cell: (one) => (one.model ? `${one.model}/${one.version}` : "none yet") },
    {
      label: "Moves",
      wide: true,
      of: (one) => String(one.pinned),
      cell: (one) => (one.pinned ? html`<${Badge}>stays at this version<//>` : "with the active version"),
    },
    { label: "Chosen", wide: true, of: (one) => String(one.assigned), cell: (one) => (one.assigned ? "by an operator" : "as the first model") },
    { label: "", of: () => null, right: true, cell: (one) => mayAct() && html`<button onClick=${() => setChanged(one)}>Change</button>` },
  ];
  return html`
    <${Card} title="Fleets">
      <${Table} label="Fleets" columns=${columns} rows=${facts.fleets} keyOf=${(one) => one.fleet} />
      ${changed && html`<${Change} fleet=${changed} facts=${facts} onClose=${() => setChanged(null)} onDone=${onDone} />`}
    <//>
  `;
}

function Change({ fleet, facts, onClose, onDone }) {
  const names = [...new Set(facts.versions.map((one) => one.state.model))];
  const options = names.flatMap((name) => [
    { value: name, label: `${name}, the active version` },
    ...facts.versions
      .filter((one) => one.state.model === name)
      .map((one) => ({ value: `${name}/${one.state.version}`, label: `${name}/${one.state.version}, and stay there` })),
  ]);
  const [value, setValue] = useState(fleet.pinned ? `${fleet.model}/${fleet.version}` : fleet.model);
  const [error, setError] = useState("");
  const save = async (event) => {
    event.preventDefault();
    const [model, version] = value.split("/");
    try {
      const answer = await act(`fleets/${fleet.fleet}/assign`, { model, version: version ? Number(version) : null });
      onClose();
      say(answer.done);
      onDone();
    } catch (refused) {
      setError(refused.message);
    }
  };
  return html`
    <${Dialog} title=${`Model of the fleet ${fleet.fleet}`} onClose=${onClose}>
      <p>Its devices move within seconds.</p>
      ${error && html`<div class="notice bad" role="alert">${error}</div>`}
      <form onSubmit=${save}>
        <select aria-label="Model" value=${value} onChange=${(event) => setValue(event.target.value)}>
          ${options.map((one) => html`<option value=${one.value}>${one.label}</option>`)}
        </select>
        <div class="buttons">
          <button type="button" onClick=${onClose}>Cancel</button>
          <button class="main">Assign</button>
        </div>
      </form>
    <//>
  `;
}
