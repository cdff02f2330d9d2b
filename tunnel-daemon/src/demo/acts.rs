//! The story of the demo in three acts.

use std::cell::Cell;
use std::time::Duration;

use anyhow::{Context as _, ensure};

use super::driver::Driver;
use super::stats::{Samples, millis};
use super::steps::Steps;
use super::world::SPARE;
use adit_host::wait::wait_until;

/// Clients that stop reading.
const STALLED: usize = 4;
/// Requests of the client beside them, first alone and then beside the stalled ones.
const ECHOES: usize = 50;
/// Bytes of a stalled download: more than all buffers on its path hold.
const STALLED_BYTES: u64 = 64 << 20;
/// Consecutive looks without progress after which the downloads count as stalled.
const LOOKS: usize = 2;
/// Time for downloads to stall.
const HALT_PATIENCE: Duration = Duration::from_secs(2);
/// On an idle machine, a slowdown beyond this factor is not chance.
const ALIKE: u32 = 2;
/// Dials through an agent before it is stopped, and through the other one afterwards.
const DIALS: u64 = 20;
/// Time for the agent to be dialled, and for its tunnels to end.
const AGENT_PATIENCE: Duration = Duration::from_secs(20);
/// Bytes each way.
const BULK_BYTES: u64 = 32 << 20;

/// Plays all acts. The driver's tunnels share no connection: the client's HTTP/2 library would decide which one waits.
pub(super) async fn all(driver: &Driver<'_>, steps: &mut Steps<'_>) {
    let title = "1  Four clients stop reading. Does an echo beside them wait?";
    steps.act(title, stalled_readers(driver)).await;
    let title = "2  An agent is stopped while clients connect. Does a dial fail?";
    steps.act(title, Box::pin(stopped_agent(driver))).await;
    let title = "3  Bytes both ways. Does each one arrive?";
    steps.act(title, both_ways(driver)).await;
}

/// Measures an echo alone, and beside clients that stalled their downloads through the same agent.
async fn stalled_readers(driver: &Driver<'_>) -> anyhow::Result<String> {
    let target = driver.world.bulk;
    let echo = async || {
        let times: Samples = driver.answers(target, ECHOES).await?;
        let (median, _most) = times.percentiles().context("no answer")?;
        anyhow::Ok(median)
    };
    let alone = echo().await.context("alone")?;
    let mut stalled = Vec::new();
    for _client in 0..STALLED {
        let mut client = driver.open(target).await?;
        let unread = client.bulk(STALLED_BYTES).await?;
        stalled.push((client, unread));
    }
    halt(driver).await;
    let beside = echo().await.context("beside stalled readers")?;
    drop(stalled);
    Ok(isolation(alone, beside))
}

/// Waits until the downloads move no more bytes. If a busy machine takes longer, the echo is measured anyway.
async fn halt(driver: &Driver<'_>) {
    let table = driver.world.server.metrics.adit().open_tunnels();
    let (mut before, mut looks) = (0, 0);
    wait_until(HALT_PATIENCE, || {
        let now: u64 = table.all().iter().map(|live| live.bytes().1).sum();
        looks = if now == before { looks + 1 } else { 0 };
        before = now;
        now > 0 && looks >= LOOKS
    })
    .await;
}

fn isolation(alone: Duration, beside: Duration) -> String {
    let means = if beside <= alone * ALIKE {
        "as fast as before"
    } else {
        "slower (busy machine?)"
    };
    format!(
        "An echo took {} before, {} beside them: {means}.",
        millis(alone),
        millis(beside)
    )
}

/// Dials without a pause, while one of two agents for the same target is stopped as by SIGTERM.
async fn stopped_agent(driver: &Driver<'_>) -> anyhow::Result<String> {
    let world = driver.world;
    let spare = world.start_agent(SPARE).await?;
    let left: Cell<Option<u64>> = Cell::new(None);
    let dialling = async {
        let mut dials = 0_u64;
        while left.get().is_none_or(|left| left > 0) {
            let page = driver.page(world.bulk).await;
            page.with_context(|| format!("dial {} failed", dials + 1))?;
            dials += 1;
            left.set(left.get().map(|left| left - 1));
        }
        anyhow::Ok(dials)
    };
    let stopping = async {
        wait_until(AGENT_PATIENCE, || spare.dials() >= DIALS).await;
        spare.running.drain();
        spare.running.idle(AGENT_PATIENCE).await;
        let through = spare.dials();
        spare.running.stop().await;
        left.set(Some(DIALS));
        through
    };
    let (dials, through) = tokio::join!(dialling, stopping);
    let dials = dials?;
    ensure!(
        (DIALS..dials).contains(&through),
        "{through} of {dials} dials went through the agent that was stopped"
    );
    Ok(format!(
        "{dials} dials, {through} of them through that agent: none failed."
    ))
}

async fn both_ways(driver: &Driver<'_>) -> anyhow::Result<String> {
    let down = driver.download(BULK_BYTES).await?;
    let up = driver.upload(BULK_BYTES).await?;
    Ok(format!("{down} down, {up} up: every byte compared."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn isolation_text_matches_the_measurement() {
        let millis = Duration::from_millis;
        assert_eq!(
            isolation(millis(1), millis(2)),
            "An echo took 1.00 ms before, 2.00 ms beside them: as fast as before."
        );
        let slower = isolation(millis(100), millis(900));
        assert!(
            slower.len() <= 77,
            "the terminal's 80 less the margin: {slower}"
        );
        assert!(
            slower.contains("busy machine?") && !slower.contains("as fast"),
            "{slower}"
        );
    }
}
