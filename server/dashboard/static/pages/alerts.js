// The alerts: what someone may have to act on, and what was over by itself.

import { html } from "../vendor/preact-htm.js";
import { Action, Badge, Card, Empty, Stale, Waiting } from "../parts.js";
import { now, useFacts } from "../server.js";
import { ago, clock, lasting } from "../words.js";

const HOUR_S = 3600;

export function AlertsPage() {
  const { facts, error, reload } = useFacts("alerts");
  if (!facts) return html`<${Waiting} error=${error} />`;
  const open = facts.filter((one) => one.closed_at === null);
  const closed = facts.filter((one) => one.closed_at !== null);
  return html`
    <div class="heading"><h1>Alerts</h1></div>
    <${Stale} error=${error} />
    ${open.map((one) => html`<${Open} key=${one.id} alert=${one} onDone=${reload} />`)}
    ${!open.length &&
    html`<${Empty} title="Nothing to act on">
      <p>An alert opens when a device is silent, falls back too much, answers unlike its model's curve, or refuses a bundle, when a training stands still, and when a certificate is near its end. It closes by itself when that is over.</p>
    <//>`}
    ${closed.length > 0 &&
    html`<${Card} title="Closed" note="newest first">
      ${closed.map((one) => html`<${Closed} key=${one.id} alert=${one} />`)}
    <//>`}
  `;
}

function Open({ alert, onDone }) {
  const silenced = alert.silenced_until !== null && alert.silenced_until > now();
  const body = { about: alert.about, kind: alert.kind, seconds: silenced ? 0 : 24 * HOUR_S };
  return html`
    <${Card} tone=${alert.level === "critical" ? "bad" : "warn"}>
      <div class="row">
        <${Badge} tone=${alert.level === "critical" ? "bad" : "warn"}>${alert.kind}<//>
        <b><${About} alert=${alert} /></b>
        <span class="soft" title=${clock(alert.opened_at)}>opened ${ago(alert.opened_at)}</span>
        ${silenced && html`<${Badge}>silenced for ${lasting(alert.silenced_until - now())}<//>`}
        <span class="push">
          <${Action} label=${silenced ? "End the silence" : "Silence for a day"} path="alerts/silence" body=${body} onDone=${onDone}
            question=${silenced ? "Webhook and topic are told again." : "The alert stays here, and nobody else is told of it for a day."} />
        </span>
      </div>
      <div>${alert.text}</div>
    <//>
  `;
}

const Closed = ({ alert }) => html`
  <div class="row">
    <${Badge}>${alert.kind}<//> <b><${About} alert=${alert} /></b>
    <span>${alert.text}</span>
    <span class="soft push" title=${clock(alert.closed_at)}>closed ${ago(alert.closed_at)}</span>
  </div>
`;

const About = ({ alert }) => {
  if (alert.kind === "training") return html`<a href="#/training">${alert.about}</a>`;
  return alert.about === "server" ? "server" : html`<a href="#/device/${alert.about}">${alert.about}</a>`;
};
