// The audit log: who did what, from where, and what was refused.

import { html, useState } from "../vendor/preact-htm.js";
import { Badge, Card, Stale, Waiting } from "../parts.js";
import { now, useFacts } from "../server.js";
import { ago, clock, number } from "../words.js";

const DAYS = [
  ["", "any time"],
  ["3600", "the last hour"],
  ["86400", "the last day"],
  ["604800", "the last week"],
];

export function AuditPage() {
  const [about, setAbout] = useState("");
  const [what, setWhat] = useState("");
  const [outcome, setOutcome] = useState("");
  const [within, setWithin] = useState("");
  const [limit, setLimit] = useState(100);
  const asked = new URLSearchParams({ limit });
  const named = /^[a-z0-9-]*$/.test(about);
  if (about && named) asked.set("about", about);
  if (what) asked.set("what", what);
  if (outcome) asked.set("outcome", outcome);
  // whole minutes, so that the question stays the same from one look to the next
  if (within) asked.set("since", 60 * Math.floor((now() - Number(within)) / 60));
  const { facts, error } = useFacts(`audit?${asked}`, 5);
  return html`
    <div class="heading"><h1>Audit</h1></div>
    <${Card}>
      <div class="filters">
        <input type="search" placeholder="Device or model" aria-label="About" value=${about} onInput=${(event) => setAbout(event.target.value.trim().toLowerCase())} />
        <select aria-label="Kind" value=${what} onChange=${(event) => setWhat(event.target.value)}>
          <option value="">all kinds</option>
          ${KINDS.map(([value, label]) => html`<option value=${value}>${label}</option>`)}
        </select>
        <select aria-label="Outcome" value=${outcome} onChange=${(event) => setOutcome(event.target.value)}>
          <option value="">all outcomes</option>
          <option value="done">done</option>
          <option value="refused">refused</option>
        </select>
        <select aria-label="Time" value=${within} onChange=${(event) => setWithin(event.target.value)}>
          ${DAYS.map(([value, label]) => html`<option value=${value}>${label}</option>`)}
        </select>
      </div>
      ${!named && html`<div class="notice warn" role="status">A name has a-z, 0-9 and -, so all names are shown. A model's name goes without its version.</div>`}
      <${Stale} error=${facts && error} />
      ${facts ? html`<${Events} entries=${facts.entries} />` : html`<${Waiting} error=${error} />`}
      ${facts &&
      facts.entries.length === limit &&
      html`<div class="center"><button onClick=${() => setLimit(10 * limit)}>Show older entries</button></div>`}
    <//>
  `;
}

const KINDS = [
  ["device.", "devices"],
  ["token.", "tokens"],
  ["model.", "models"],
  ["fleet.", "fleets"],
  ["rollout.", "roll-outs"],
  ["quarantine.", "refused bundles"],
  ["alert.", "alerts"],
  ["credential.", "credentials"],
  ["key.", "API keys"],
  ["root.", "signing keys"],
  ["server.", "server"],
  ["dashboard.", "dashboard"],
  ["http.", "requests"],
  ["mqtt.", "broker"],
  ["audit.", "entries left out"],
];

/** Entries of the audit log as lines, newest first. */
export const Events = ({ entries }) => html`
  <div class="events" role="table" aria-label="Events">
    ${entries.map(
      (one) => html`
        <div class="event" role="row" key=${one.id}>
          <span class="soft when" role="cell" title=${clock(one.at)}>${ago(one.until)}</span>
          <span role="cell"><b>${one.who || "unknown"}</b></span>
          <span role="cell" class="what">
            ${one.what} ${one.outcome === "refused" && html`<${Badge} tone="bad">refused<//>`}
            ${one.count > 1 && html` <${Badge}>× ${number(one.count)}<//>`}
          </span>
          <span role="cell" class="detail">${one.detail}</span>
          <span role="cell" class="soft from">${one.source}</span>
        </div>
      `,
    )}
    ${!entries.length && html`<p class="soft center">No such entries.</p>`}
  </div>
`;
