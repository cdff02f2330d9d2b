//! Checks driven through every frontend, with their expected results.

use std::time::Duration;

use anyhow::{bail, ensure};

use super::captured;
use super::driver::Driver;
use super::http_client::Opened;
use super::paths::Paths;
use super::steps::Steps;
use super::targets::GREETING;
use super::world::World;
use adit_host::wait::wait_until;

/// Time for connections to close after the last tunnel.
const LEFTOVER_PATIENCE: Duration = Duration::from_secs(5);
/// Bytes of a bulk transfer, each way, per frontend.
const BULK_BYTES: u64 = 64 << 20;
/// Requests on one open tunnel.
const ANSWERS: usize = 200;
/// Tunnels opened one after the other.
const DIALS: usize = 50;

/// Drives every frontend once.
pub(super) async fn all(world: &World, steps: &mut Steps<'_>) {
    for frontend in &world.frontends {
        steps.heading(frontend.name, &frontend.place);
        let driver = Driver { world, frontend };
        no_tunnel_open(world).await;
        let before = Paths::of(world);
        steps.step("web page", driver.greeting()).await;
        steps.step("download", driver.download(BULK_BYTES)).await;
        steps.step("upload", driver.upload(BULK_BYTES)).await;
        steps.step("answers", driver.timed_answers()).await;
        steps.step("new tunnels", driver.dials(DIALS)).await;
        steps.step("refused target", driver.refusal()).await;
        steps.step("path", driver.path()).await;
        steps.step("moved by", moved_by(world, before)).await;
    }
    if let Some(captured) = &world.captured {
        steps.heading("redirect", &captured.path().display().to_string());
        steps
            .step("plain curl", captured::page(world, captured))
            .await;
    }
    steps.heading("Afterwards", "");
    steps.step("links", links(world)).await;
    steps.step("leftovers", leftovers(world)).await;
}

impl Driver<'_> {
    async fn greeting(&self) -> anyhow::Result<String> {
        let web = self.world.web;
        self.page(web).await?;
        Ok(format!("{:?} from {web}", GREETING.trim_end()))
    }

    async fn timed_answers(&self) -> anyhow::Result<String> {
        let times = self.answers(self.world.web, ANSWERS).await?.text();
        Ok(format!("{ANSWERS} requests on one tunnel, {times}"))
    }

    /// A refused dial must return the agent's own text and the matching status.
    async fn refusal(&self) -> anyhow::Result<String> {
        let target = self.world.closed;
        let expected = format!("dial tcp {target}: connect: connection refused");
        let (status, text) = match self.frontend.open(target, &self.world.tasks).await? {
            Opened::Tunnel(_io) => bail!("a tunnel to {target}, where nothing listens"),
            Opened::Refused(status, text) => (status, text),
        };
        ensure!(
            text == expected,
            "refused with {text:?} instead of {expected:?}"
        );
        match status.map(|status| status.as_u16()) {
            None => Ok(format!("{text:?}")),
            Some(502) => Ok(format!("502, {text:?}")),
            Some(other) => bail!("status {other} instead of 502"),
        }
    }

    /// Each target is reached by the agent that claims its address, and by no other agent.
    async fn path(&self) -> anyhow::Result<String> {
        let mut paths = Vec::new();
        let targets = [self.world.web, self.world.bulk];
        for (agent, target) in self.world.agents.iter().zip(targets) {
            let before: Vec<u64> = self.world.agents.iter().map(|a| a.dials()).collect();
            self.page(target).await?;
            for (other, before) in self.world.agents.iter().zip(before) {
                let (dials, due) = (other.dials() - before, u64::from(other.name == agent.name));
                ensure!(
                    dials == due,
                    "agent {} dialled {dials} times for {target} instead of {due}",
                    other.name
                );
            }
            paths.push(format!("agent {} -> {target}", agent.name));
        }
        let paths = paths.join(" | ");
        Ok(format!("frontend -> router -> lane or link -> {paths}"))
    }
}

/// Waits until all tunnels are closed: then the counters include their bytes.
pub(super) async fn no_tunnel_open(world: &World) {
    wait_until(LEFTOVER_PATIENCE, || world.open_tunnels() == 0).await;
}

/// Paths of the tunnels since `before`.
async fn moved_by(world: &World, before: Paths) -> anyhow::Result<String> {
    no_tunnel_open(world).await;
    let (on_lanes, text) = Paths::of(world).since(before);
    ensure!(on_lanes > 0, "no tunnel found a lane: {text}");
    Ok(text)
}

async fn links(world: &World) -> anyhow::Result<String> {
    let credit = world.series("adit_links{peer=\"adit\"}");
    let (links, agents) = (world.server.links(), world.agents.len());
    ensure!(
        links == agents && credit == agents as u64,
        "{links} links, {credit} with credit, instead of {agents}"
    );
    Ok(format!("{links}, all with credit per tunnel"))
}

/// Checks that no tunnel and no target connection outlives its client.
async fn leftovers(world: &World) -> anyhow::Result<String> {
    let open = || {
        let targets: i64 = world
            .agents
            .iter()
            .map(|agent| agent.running.metrics.open_endpoint_connections())
            .sum();
        (world.open_tunnels(), targets)
    };
    wait_until(LEFTOVER_PATIENCE, || open() == (0, 0)).await;
    let (tunnels, targets) = open();
    ensure!(
        (tunnels, targets) == (0, 0),
        "{tunnels} tunnels and {targets} target connections are still open after {LEFTOVER_PATIENCE:?}"
    );
    let all = world.tunnels();
    Ok(format!("none of {all} tunnels is left open"))
}
