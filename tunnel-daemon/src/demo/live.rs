//! After the acts: a light endless load, and its summary in one line.

use std::convert::Infallible;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use super::driver::Driver;
use super::screen::{BAD, Screen};
use super::world::World;
use crate::status::text::age;

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

/// Drives tunnels until cancelled.
pub(super) async fn drive(world: &World, screen: &Screen) -> Infallible {
    loop {
        for frontend in &world.frontends {
            let driver = Driver { world, frontend };
            let round = async {
                driver.answers(world.web, ROUND_ANSWERS).await?;
                driver.dials(ROUND_DIALS).await?;
                driver.download(ROUND_BYTES).await?;
                driver.upload(ROUND_BYTES / 4).await?;
                anyhow::Ok(())
            };
            let wrong = match tokio::time::timeout(ROUND_PATIENCE, round).await {
                Ok(Ok(())) => continue,
                Ok(Err(error)) => format!("{error:#}"),
                Err(_elapsed) => format!("not done after {ROUND_PATIENCE:?}"),
            };
            let mark = screen.paint(BAD, "WRONG");
            screen.line(format_args!("  {mark} {}: {wrong}", frontend.name));
            world.stats.wrong.fetch_add(1, Relaxed);
        }
        tokio::time::sleep(ROUND_PAUSE).await;
    }
}

/// Shows the summary until cancelled, or until standard output is closed.
pub(super) async fn show(world: &World, screen: &Screen) {
    let started = Instant::now();
    let every = match screen.is_rich {
        true => REDRAW_EVERY,
        false => LINE_EVERY,
    };
    while !screen.is_gone() {
        tokio::time::sleep(every).await;
        let elapsed = Duration::from_secs(started.elapsed().as_secs());
        let text = format!("live {}: {}", age(elapsed), summary(world));
        if screen.is_rich {
            screen.working(&format!("{text}; Ctrl-C"));
        } else {
            screen.line(text);
        }
    }
}

/// Counts of tunnels, bytes and failures.
pub(super) fn summary(world: &World) -> String {
    format!(
        "{} tunnels, {} open, {}, {} wrong",
        world.tunnels(),
        world.open_tunnels(),
        world.stats.moved(),
        world.stats.wrong.load(Relaxed)
    )
}
