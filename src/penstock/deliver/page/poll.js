// Polls the server: every second, and less often while it does not answer.

const EVERY = 1_000;
const SLOWEST = 8_000;

class Unreachable extends Error {}

export async function get(address) {
  try {
    const answer = await fetch(address, { signal: AbortSignal.timeout(10_000) });
    if (answer.ok) return await answer.json();
    throw new Error(`${address} answered ${answer.status}`);
  } catch (problem) {
    throw new Unreachable(problem.message, { cause: problem });
  }
}

export async function poll(request, failed) {
  let pause = EVERY;
  for (;;) {
    try {
      await request();
      pause = EVERY;
    } catch (problem) {
      pause = Math.min(SLOWEST, pause * (1.3 + Math.random() * 0.4));
      const unreachable = problem instanceof Unreachable;
      // An error in this page, not in the server.
      if (!unreachable) console.error(problem);
      failed(`${unreachable ? "no answer from the server" : "an error in this page"}; retrying in ${Math.ceil(pause / 1_000)} s`);
    }
    await new Promise((resume) => setTimeout(resume, pause));
  }
}
