//! Slow clients must not delay a fast one: four clients stall their downloads beside a fifth, through one agent.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use super::checks::Driver;
use super::http_client::Stalled;
use super::stats::Samples;
use super::targets::GREETING;

/// Clients that stop reading.
const STALLED: usize = 4;
/// Requests of the fifth client, first alone and then beside the stalled ones.
const ECHOES: usize = 50;
/// Bytes of a stalled download: more than all buffers on its path hold.
const DOWNLOAD_BYTES: u64 = 64 << 20;
/// Interval between two checks for a stalled download.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Consecutive checks without progress after which a download counts as stalled.
const LOOKS: usize = 5;
/// Time for downloads to stall. If a busy machine takes longer, the echo is measured anyway.
const HALT_PATIENCE: Duration = Duration::from_secs(2);
/// On an idle machine, a slowdown beyond this factor is not chance.
const ALIKE: u32 = 2;

/// Measures both cases and describes the result.
///
/// # Errors
/// A wrong answer, or a broken tunnel.
pub(super) async fn stalled_readers(driver: &Driver<'_>) -> anyhow::Result<String> {
    let alone = echo(driver).await.context("alone")?;
    let mut stalled = Vec::new();
    for _client in 0..STALLED {
        let client = driver.open(driver.world.bulk).await?;
        stalled.push(client.stall(DOWNLOAD_BYTES).await?);
    }
    halt(driver).await;
    let beside = echo(driver).await.context("beside stalled readers")?;
    drop::<Vec<Stalled>>(stalled);
    Ok(text(alone, beside))
}

/// The median response time through the agent that also serves the downloads.
async fn echo(driver: &Driver<'_>) -> anyhow::Result<Duration> {
    let mut client = driver.open(driver.world.bulk).await?;
    let times = Samples::default();
    for number in 1..=ECHOES {
        let started = Instant::now();
        let answer = client.page("/").await;
        let answer = answer.with_context(|| format!("request {number} of {ECHOES}"))?;
        ensure!(answer == GREETING, "answer {number} is {answer:?}");
        times.add(started);
    }
    times.median().context("no answer")
}

/// Waits until the downloads move no more bytes.
async fn halt(driver: &Driver<'_>) {
    let table = driver.world.server.metrics.adit().open_tunnels();
    let moved = || -> u64 { table.all().iter().map(|live| live.bytes().1).sum() };
    let halted = async {
        let (mut before, mut looks) = (0, 0);
        while looks < LOOKS {
            tokio::time::sleep(LOOK_EVERY).await;
            let now = moved();
            looks = if now == before && now > 0 {
                looks + 1
            } else {
                0
            };
            before = now;
        }
    };
    let _busy = tokio::time::timeout(HALT_PATIENCE, halted).await;
}

fn text(alone: Duration, beside: Duration) -> String {
    let millis = |time: Duration| time.as_secs_f64() * 1e3;
    let means = if beside <= alone * ALIKE {
        "a client that stops reading does not slow the others down"
    } else {
        "slower here: is this machine busy? On an idle one both are alike"
    };
    format!(
        "an echo takes {:.2} ms alone, {:.2} ms beside {STALLED} clients that stopped reading (medians): {means}",
        millis(alone),
        millis(beside)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn isolation_text_matches_the_measurement() {
        let millis = Duration::from_millis;
        assert_eq!(
            text(millis(1), millis(2)),
            "an echo takes 1.00 ms alone, 2.00 ms beside 4 clients that stopped reading (medians): \
             a client that stops reading does not slow the others down"
        );
        let slower = text(millis(1), millis(9));
        assert!(
            slower.contains("is this machine busy?") && !slower.contains("does not"),
            "{slower}"
        );
    }
}
