// One feed: a copy of its table that survives reconnects, and the latency of its rows.

import { serverNow, tookPong } from "./clock.js";

const REPORT_EVERY = 1_000;
const MOST_PER_REPORT = 400;

export class Feed {
  constructor(name, { onChange, onLatency, onState }) {
    this.name = name;
    this.rows = new Map();
    this.timestamps = new Set();
    this.state = "connecting";
    this.latest = null;
    this.onChange = onChange;
    this.onLatency = onLatency;
    this.onState = onState;
    this.position = null;
    this.report = [];
    setInterval(() => this.sendReport(), REPORT_EVERY);
  }

  connect() {
    if (this.socket) return;
    const address = new URL(`/feeds/${encodeURIComponent(this.name)}`, location.href);
    address.protocol = location.protocol === "https:" ? "wss:" : "ws:";
    if (this.position) address.searchParams.set("after", this.position);
    const socket = (this.socket = new WebSocket(address));
    let joined = false;
    socket.onmessage = ({ data }) => {
      const message = JSON.parse(data);
      if ("pong" in message) return tookPong(message);
      this.take(message, joined);
      if (!joined) this.become("live");
      joined = true;
    };
    socket.onclose = () => {
      this.socket = null;
      this.become("lost");
    };
  }

  ping(sent) {
    if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify({ ping: sent }));
  }

  become(state) {
    this.state = state;
    this.onState(this);
  }

  take(message, live) {
    const changed = [];
    if (message.kind === "snapshot") {
      changed.push(...this.rows.keys());
      this.rows.clear();
    }
    const now = serverNow();
    const took = [];
    for (const { key, row, time } of message.rows) {
      const name = JSON.stringify(key);
      if (row === null) this.rows.delete(name);
      else this.rows.set(name, flat(row, this.timestamps));
      changed.push(name);
      // Rows of a snapshot, or missed while disconnected, have no meaningful latency.
      if (live && row !== null && time !== null && now !== null) took.push((now - time) / 1_000);
    }
    this.position = message.position;
    if (took.length) {
      this.latest = Math.max(0, took.at(-1));
      this.onLatency(took);
      this.keepForReport(took);
    }
    if (changed.length) this.onChange(this, changed);
  }

  keepForReport(took) {
    for (const ms of took) {
      if (this.report.length < MOST_PER_REPORT) this.report.push(ms);
      else this.report[Math.floor(Math.random() * MOST_PER_REPORT)] = ms;
    }
  }

  sendReport() {
    if (!this.report.length || this.socket?.readyState !== WebSocket.OPEN) return;
    this.socket.send(JSON.stringify({ latency: this.report.map((ms) => Math.round(ms * 10) / 10) }));
    this.report = [];
  }
}

const MOMENT = /^\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:?\d\d)?$/;

// Structs become columns (window.start is window_start), and timestamps become milliseconds for Vega; `timestamps` gets
// the names of their columns.
function flat(row, timestamps) {
  const columns = {};
  const put = (name, value) => {
    const moment = typeof value === "string" && MOMENT.test(value);
    if (moment) timestamps.add(name);
    columns[name] = moment ? Date.parse(value) : value;
  };
  for (const [name, value] of Object.entries(row)) {
    if (value && typeof value === "object" && !Array.isArray(value)) {
      for (const [inner, part] of Object.entries(value)) put(`${name}_${inner}`, part);
    } else put(name, value);
  }
  return columns;
}
