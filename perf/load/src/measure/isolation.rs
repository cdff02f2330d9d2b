//! Echo beside stalled readers, compared with echo alone in the same run.

use std::time::Duration;

use adit_perf_plan::{Sample, quantile_us};
use anyhow::{Context as _, ensure};
use tokio::io::AsyncWriteExt as _;

use super::Load;
use super::echo::closed_loop;
use crate::way::Target;

/// Time until every buffer on the path to a stalled reader is full.
const FILL: Duration = Duration::from_millis(500);
/// Time until the buffers of stalled readers are released.
const SETTLE: Duration = Duration::from_millis(200);
/// An echo run that exceeds its duration by this much has stalled.
const STALL_LIMIT: Duration = Duration::from_secs(3);

/// Runs the measurement. A stalled echo is a result, not a failure: it sets `isolation_completed` to 0.
pub(super) async fn measure(load: &Load, sample: &mut Sample) -> anyhow::Result<()> {
    let lasting = load.plan.lasting();
    let mut calm = closed_loop(&load.dialer, 1, lasting / 2).await?;
    let readers = load.plan.stalled_readers;
    let mut stalled = load.dialer.open_all(Target::Source, readers).await?;
    // All are open before the first stalls: a server without isolation would not even accept the next dial.
    for tunnel in &mut stalled {
        tunnel.write_all(b"0\n").await?;
    }
    tokio::time::sleep(FILL).await;
    let echo = closed_loop(&load.dialer, 1, lasting);
    let beside = tokio::time::timeout(lasting + STALL_LIMIT, echo).await;
    let mut beside = beside.ok().and_then(Result::ok).unwrap_or_default();
    let completed = if beside.is_empty() { 0.0 } else { 1.0 };
    sample.value("isolation_completed", completed);
    if beside.is_empty() {
        return Ok(());
    }
    // The second half of the calm run comes afterwards, which averages out a machine whose speed drifts.
    drop(stalled);
    tokio::time::sleep(SETTLE).await;
    calm.extend(closed_loop(&load.dialer, 1, lasting / 2).await?);
    calm.sort_unstable();
    beside.sort_unstable();
    for (suffix, q) in [("p50", 0.5), ("p99", 0.99)] {
        let (before, after) = quantile_us(&calm, q)
            .zip(quantile_us(&beside, q))
            .context("not one answer came")?;
        ensure!(before > 0.0, "echo took no time");
        sample.value(format!("isolation_{suffix}_ratio"), after / before);
    }
    Ok(())
}
