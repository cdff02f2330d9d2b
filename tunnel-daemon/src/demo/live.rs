//! After the checks: a light endless load, and a live summary.

use std::convert::Infallible;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use super::checks::Driver;
use super::counters::Counters;
use super::screen::{Screen, Tone};
use super::stats::{Rate, Stats, bytes};
use super::world::{CREDIT_LINKS, OPEN_TUNNELS, TUNNELS, World};

/// Pause between two rounds of the load.
const ROUND_PAUSE: Duration = Duration::from_secs(1);
/// A round that takes longer counts as failed.
const ROUND_PATIENCE: Duration = Duration::from_secs(30);
/// Bytes per round and frontend: this many down, a quarter of it up.
const ROUND_BYTES: u64 = 4 << 20;
/// Requests per round and frontend on one tunnel.
const ROUND_ANSWERS: usize = 20;
/// Tunnels per round and frontend, one after the other.
const ROUND_DIALS: usize = 3;
/// Interval between two summaries on a terminal.
const REDRAW_EVERY: Duration = Duration::from_millis(500);
/// Interval between two summaries on a pipe.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Failures since the checks.
#[derive(Default)]
pub(super) struct Wrong(Mutex<Vec<String>>);

impl Wrong {
    /// Number of failures.
    #[must_use]
    pub(super) fn count(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    fn add(&self, what: String) {
        /// Most failures that are kept; further ones add nothing new.
        const KEPT: usize = 1000;
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() < KEPT {
            all.push(what);
        }
    }
}

/// Drives tunnels until cancelled.
pub(super) async fn drive(
    world: &World,
    stats: &Stats,
    screen: &Screen,
    wrong: &Wrong,
) -> Infallible {
    loop {
        for frontend in &world.frontends {
            let driver = Driver {
                world,
                stats,
                frontend,
                told: None,
            };
            let round = async {
                driver.answers(ROUND_ANSWERS).await?;
                driver.dials(ROUND_DIALS).await?;
                driver.download(ROUND_BYTES).await?;
                driver.upload(ROUND_BYTES / 4).await?;
                anyhow::Ok(())
            };
            let outcome = match tokio::time::timeout(ROUND_PATIENCE, round).await {
                Ok(Ok(())) => continue,
                Ok(Err(error)) => format!("{error:#}"),
                Err(_elapsed) => format!("not done after {ROUND_PATIENCE:?}"),
            };
            screen.step(frontend.name, &Err(outcome.clone()));
            wrong.add(outcome);
        }
        tokio::time::sleep(ROUND_PAUSE).await;
    }
}

/// Shows the summary until cancelled, or until standard output is closed.
pub(super) async fn show(world: &World, stats: &Stats, screen: &Screen, wrong: &Wrong) {
    let started = Instant::now();
    let (down, up) = stats.moved();
    let mut rates = (Rate::new(down), Rate::new(up));
    let every = if screen.is_rich() {
        REDRAW_EVERY
    } else {
        LINE_EVERY
    };
    while !screen.is_gone() {
        tokio::time::sleep(every).await;
        let (at, (down, up)) = (Instant::now(), stats.moved());
        let now = Now {
            elapsed: Duration::from_secs(started.elapsed().as_secs()),
            links: world.server.links(),
            credit: world.series(CREDIT_LINKS),
            open: world.series(OPEN_TUNNELS),
            tunnels: world.series(TUNNELS),
            down: (down, rates.0.per_second(at, down)),
            up: (up, rates.1.per_second(at, up)),
            ways: Counters::of(world),
            wrong: wrong.count(),
        };
        if screen.is_rich() {
            screen.working(now.block(stats, screen));
        } else {
            screen.line(now.line(stats));
        }
    }
}

struct Now {
    elapsed: Duration,
    links: usize,
    credit: u64,
    open: u64,
    tunnels: u64,
    down: (u64, u64),
    up: (u64, u64),
    ways: Counters,
    wrong: usize,
}

impl Now {
    fn line(&self, stats: &Stats) -> String {
        format!(
            "live {}: {} links ({} with credit), {} tunnels open of {}, down {} ({}/s), up {} ({}/s), \
             dial {}, answer {}, {} wrong; {}",
            humantime::format_duration(self.elapsed),
            self.links,
            self.credit,
            self.open,
            self.tunnels,
            bytes(self.down.0),
            bytes(self.down.1),
            bytes(self.up.0),
            bytes(self.up.1),
            stats.dials.percentiles(),
            stats.answers.percentiles(),
            self.wrong,
            self.ways,
        )
    }

    /// A block that fits 80 columns, two of which the spinner takes.
    fn block(&self, stats: &Stats, screen: &Screen) -> String {
        let label = |text: &str| screen.paint(Tone::Faint, format_args!("{text:<8}"));
        let verdict = if self.wrong == 0 {
            screen.paint(Tone::Good, "all bytes and answers right")
        } else {
            screen.paint(Tone::Bad, format_args!("{} wrong", self.wrong))
        };
        let moved = |(all, rate)| format!("{:>11}  {:>11}/s", bytes(all), bytes(rate));
        let mut lines = vec![
            format!(
                "{} {}, {verdict}; Ctrl-C ends it",
                screen.paint(Tone::Strong, "running"),
                humantime::format_duration(self.elapsed)
            ),
            format!(
                "{}{}, {} with credit per tunnel",
                label("links"),
                self.links,
                self.credit
            ),
            format!(
                "{}{} open, {} so far",
                label("tunnels"),
                self.open,
                self.tunnels
            ),
            format!("{}{}", label("down"), moved(self.down)),
            format!("{}{}", label("up"), moved(self.up)),
            format!("{}{}", label("dial"), stats.dials.percentiles()),
            format!("{}{}", label("answer"), stats.answers.percentiles()),
            format!("{}{}", label("path"), self.ways.framed()),
        ];
        if let Some((relayed, moved)) = self.ways.raw() {
            lines.push(format!("{}{relayed}", label("")));
            lines.push(format!("{}{moved}", label("")));
        }
        lines.join("\n  ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now(ways: Counters) -> Now {
        Now {
            elapsed: Duration::from_secs(86_399),
            links: 2,
            credit: 2,
            open: 3,
            tunnels: 12_345_678,
            down: (1023 << 30, 1023 << 20),
            up: (1023 << 30, 1023 << 20),
            ways,
            wrong: 0,
        }
    }

    #[test]
    fn summaries_name_the_paths_and_relay_of_tunnels() {
        let (stats, screen) = (Stats::default(), Screen::new(true));
        let framed = Counters {
            lane: 12_345_678,
            link: 1_234_567,
            ..Counters::default()
        };
        let text = "12345678 tunnels on lanes, 1234567 on the link, copied by their tasks";
        let block = now(framed).block(&stats, &screen);
        assert!(
            block.ends_with(&format!("\n  path    {text}")),
            "no word of relay threads, which had nothing to do:\n{block}"
        );
        let line = now(framed).line(&stats);
        assert!(line.ends_with(&format!(", 0 wrong; {text}")), "{line}");

        let raw = Counters {
            raw_lane: 12_345_678,
            spliced: 1023 << 30,
            copied: 1023 << 20,
            uring: true,
            ..framed
        };
        let relayed = "12345678 on raw lanes, relayed with io_uring";
        let moved = "1023.00 GiB spliced, 1023.00 MiB copied";
        let block = now(raw).block(&stats, &screen);
        assert!(
            block.ends_with(&format!(
                "path    {text}\n          {relayed}\n          {moved}"
            )),
            "{block}"
        );
        let line = now(raw).line(&stats);
        assert!(
            line.ends_with(&format!("{text}; {relayed}: {moved}")),
            "{line}"
        );
        // The spinner and a blank precede the first line, and two blanks the others.
        for line in format!("  {block}").lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
    }
}
