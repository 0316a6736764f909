// The server's clock, estimated from the fastest of the last pings.

const REMEMBERED = 8;
const answers = [];

export const browserNow = () => (performance.timeOrigin + performance.now()) * 1_000;

export function tookPong({ pong, now }) {
  const received = browserNow();
  answers.push({ trip: received - pong, offset: now - (pong + received) / 2 });
  if (answers.length > REMEMBERED) answers.shift();
}

// Microseconds, or null before the first answer.
export function serverNow() {
  if (!answers.length) return null;
  const best = answers.reduce((a, b) => (b.trip < a.trip ? b : a));
  return browserNow() + best.offset;
}
