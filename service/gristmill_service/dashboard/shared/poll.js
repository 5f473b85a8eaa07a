// Polls regularly: less often after errors, and not while the page is hidden.
export class Poll {
  constructor(ask, seconds) {
    this.ask = ask;
    this.seconds = seconds;
    this.failures = 0;
    this.timer = null;
    this.turn = 0;
    document.addEventListener("visibilitychange", () => document.hidden ? this.pause() : this.now());
  }

  pause() {
    clearTimeout(this.timer);
    this.turn += 1;
  }

  async now() {
    this.pause();
    const turn = this.turn;
    try {
      await this.ask();
      this.failures = 0;
    } catch (error) {
      this.failures += 1;
      this.failed?.(error);
    }
    // Another poll began meanwhile, or the page was hidden.
    if (turn !== this.turn || document.hidden) return;
    this.timer = setTimeout(() => this.now(), 1000 * Math.min(30, this.seconds * 2 ** Math.min(this.failures, 4)));
  }
}
