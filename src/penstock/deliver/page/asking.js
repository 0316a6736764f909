// Asks the server again and again: every second, and less often while it is away.

const EVERY = 1_000;
const SLOWEST = 8_000;

class Away extends Error {}

export async function get(address) {
  try {
    const answer = await fetch(address, { signal: AbortSignal.timeout(10_000) });
    if (answer.ok) return await answer.json();
    throw new Error(`${address} answered ${answer.status}`);
  } catch (problem) {
    throw new Away(problem.message, { cause: problem });
  }
}

export async function asking(ask, failed) {
  let patience = EVERY;
  for (;;) {
    try {
      await ask();
      patience = EVERY;
    } catch (problem) {
      patience = Math.min(SLOWEST, patience * (1.3 + Math.random() * 0.4));
      const away = problem instanceof Away;
      // A fault of the page itself is not the server's.
      if (!away) console.error(problem);
      failed(`${away ? "no answer from the server" : "this page has failed"}; trying again in ${Math.ceil(patience / 1_000)} s`);
    }
    await new Promise((resume) => setTimeout(resume, patience));
  }
}
