//! Agents that connect all at once, as after a server's restart: links established per second. Without lanes, so that all peers
//! do the same work.

use std::time::Instant;

use anyhow::Context as _;

use super::Load;
use crate::agents::Agents;
use crate::outcome::Outcome;

/// Measures each count, starting from no agents.
pub(super) async fn measure(load: &Load<'_>, outcome: &mut Outcome) -> anyhow::Result<()> {
    let port = load.agents.as_ref();
    let port = port.context("say with --agents where agents connect")?;
    for &count in load.plan.agents.iter().filter(|count| **count > 0) {
        let mut agents = Agents::new(port, false)?;
        let began = Instant::now();
        agents.grow(count).await?;
        let rate = count as f64 / began.elapsed().as_secs_f64();
        outcome.value(format!("links_{count}_per_s"), rate);
        agents.stop().await;
    }
    Ok(())
}
