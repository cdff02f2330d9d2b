//! Checks driven through every frontend, with their expected results.

use std::net::SocketAddr;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use super::captured;
use super::counters::Counters;
use super::frontend::{Frontend, OpenError};
use super::http_client::HttpClient;
use super::isolation;
use super::screen::{Screen, Tone};
use super::stats::{Samples, Stats, bytes};
use super::targets::GREETING;
use super::tunnel_table::{TunnelTable, Used};
use super::world::{CREDIT_LINKS, OPEN_TUNNELS, TUNNELS, World};
use adit_host::wait::wait_until;
use adit_telemetry::labels::ClientDialect;

/// Time limit of one step: an idle machine needs far less than a second, an emulated one half a minute.
const STEP_PATIENCE: Duration = Duration::from_secs(60);
/// Time for connections to close after the last tunnel.
const LEFTOVER_PATIENCE: Duration = Duration::from_secs(5);
/// Bytes of a bulk transfer, each way, per frontend.
const BULK_BYTES: u64 = 64 << 20;
/// Requests on one open tunnel.
const ANSWERS: usize = 200;
/// Tunnels opened one after the other.
const DIALS: usize = 50;

/// Least payload of an answer.
const ANSWER_BYTES: u64 = GREETING.len() as u64;

/// Outcome of the steps.
#[derive(Default)]
pub(super) struct Verdict {
    /// Number of steps that succeeded.
    pub(super) right: usize,
    /// Failed steps, each with what was wrong.
    pub(super) wrong: Vec<String>,
}

/// Runs steps and reports them on the screen.
struct Steps<'a> {
    screen: &'a Screen,
    verdict: Verdict,
}

impl Steps<'_> {
    async fn step(&mut self, name: &str, work: impl Future<Output = anyhow::Result<String>>) {
        self.screen.working(name);
        let outcome = match tokio::time::timeout(STEP_PATIENCE, work).await {
            Ok(outcome) => outcome.map_err(|error| format!("{error:#}")),
            Err(_elapsed) => Err(format!("not done after {STEP_PATIENCE:?}")),
        };
        self.screen.step(name, &outcome);
        match outcome {
            Ok(_detail) => self.verdict.right += 1,
            Err(wrong) => self.verdict.wrong.push(format!("{name}: {wrong}")),
        }
    }
}

/// Drives every frontend once.
pub(super) async fn all(world: &World, stats: &Stats, screen: &Screen) -> Verdict {
    let mut steps = Steps {
        screen,
        verdict: Verdict::default(),
    };
    let told = TunnelTable::of(world);
    for frontend in &world.frontends {
        screen.line(format_args!(
            "{} {}",
            screen.paint(Tone::Strong, frontend.name),
            screen.paint(Tone::Faint, frontend.place()),
        ));
        let driver = Driver {
            world,
            stats,
            frontend,
            told: Some(&told),
        };
        let before = Counters::of(world);
        steps.step("web page", driver.page()).await;
        steps.step("download", driver.download(BULK_BYTES)).await;
        steps.step("upload", driver.upload(BULK_BYTES)).await;
        steps.step("answers", driver.answers(ANSWERS)).await;
        steps.step("new tunnels", driver.dials(DIALS)).await;
        steps.step("refused target", driver.refusal()).await;
        steps.step("path", driver.path()).await;
        steps.step("moved by", driver.ways(before)).await;
    }
    // The client's HTTP/2 library decides which tunnel of a shared connection waits, so such frontends are left out.
    let fair = world
        .frontends
        .iter()
        .find(|it| it.dialect() == ClientDialect::HttpConnect);
    if let Some(frontend) = fair {
        screen.line(format_args!(
            "{} {}",
            screen.paint(Tone::Strong, "Slow clients"),
            screen.paint(Tone::Faint, "beside a fast one, all through one agent"),
        ));
        let driver = Driver {
            world,
            stats,
            frontend,
            told: None,
        };
        steps
            .step("stalled readers", isolation::stalled_readers(&driver))
            .await;
    }
    if let Some(captured) = &world.captured {
        screen.line(format_args!(
            "{} {}",
            screen.paint(Tone::Strong, "redirect"),
            screen.paint(Tone::Faint, captured.path().display()),
        ));
        steps
            .step("plain curl", captured::page(world, captured))
            .await;
    }
    screen.line(screen.paint(Tone::Strong, "Afterwards"));
    steps.step("links", links(world)).await;
    steps.step("leftovers", leftovers(world)).await;
    steps.verdict
}

/// Drives tunnels through one frontend.
pub(super) struct Driver<'a> {
    /// The running installation.
    pub(super) world: &'a World,
    /// Counts bytes and times.
    pub(super) stats: &'a Stats,
    /// The frontend under test.
    pub(super) frontend: &'a Frontend,
    /// Asked for the path of each open tunnel, if set.
    pub(super) told: Option<&'a TunnelTable<'a>>,
}

impl Driver<'_> {
    /// Opens an HTTP tunnel to `target`.
    pub(super) async fn open(&self, target: SocketAddr) -> anyhow::Result<HttpClient> {
        let tasks = &self.world.tasks;
        let started = Instant::now();
        let io = self.frontend.open(target, tasks).await?;
        self.stats.dials.add(started);
        HttpClient::over(io, &target.to_string(), tasks).await
    }

    /// Adds to `used` the path of the newest tunnel to `target` that has moved this many bytes; the tunnel must still be open.
    async fn ask(
        &self,
        used: &mut Used,
        target: SocketAddr,
        down: u64,
        up: u64,
    ) -> anyhow::Result<()> {
        if let Some(told) = self.told {
            let dialect = self.frontend.dialect();
            used.add(told.newest(dialect, target, down, up).await?);
        }
        Ok(())
    }

    async fn page(&self) -> anyhow::Result<String> {
        let (web, mut used) = (self.world.web, Used::default());
        let mut client = self.open(web).await?;
        let text = client.page("/").await?;
        ensure!(text == GREETING, "answer {text:?} instead of {GREETING:?}");
        self.ask(&mut used, web, ANSWER_BYTES, 1).await?;
        Ok(used.behind(format!("{:?} from {web}", text.trim_end())))
    }

    /// Downloads and compares every byte.
    ///
    /// # Errors
    /// The first wrong byte, or a broken tunnel.
    pub(super) async fn download(&self, length: u64) -> anyhow::Result<String> {
        let (bulk, mut used) = (self.world.bulk, Used::default());
        let mut client = self.open(bulk).await?;
        let started = Instant::now();
        let seen = |count| {
            self.stats.down.fetch_add(count, Relaxed);
        };
        client.download(length, seen).await?;
        let speed = speed(length, started);
        self.ask(&mut used, bulk, length, 1).await?;
        Ok(used.behind(speed))
    }

    /// Uploads; the target compares every byte.
    ///
    /// # Errors
    /// The first wrong byte, or a broken tunnel.
    pub(super) async fn upload(&self, length: u64) -> anyhow::Result<String> {
        let (bulk, mut used) = (self.world.bulk, Used::default());
        let mut client = self.open(bulk).await?;
        let started = Instant::now();
        client.upload(length).await?;
        self.stats.up.fetch_add(length, Relaxed);
        let speed = speed(length, started);
        self.ask(&mut used, bulk, 1, length).await?;
        Ok(used.behind(speed))
    }

    /// Sends `count` requests in sequence on one tunnel.
    ///
    /// # Errors
    /// A wrong answer, or a broken tunnel.
    pub(super) async fn answers(&self, count: usize) -> anyhow::Result<String> {
        let (web, mut used) = (self.world.web, Used::default());
        let mut client = self.open(web).await?;
        let times = Samples::default();
        for number in 1..=count {
            let started = Instant::now();
            let text = client.page("/").await;
            let text = text.with_context(|| format!("request {number} of {count}"))?;
            ensure!(text == GREETING, "answer {number} is {text:?}");
            self.stats.answers.add(started);
            times.add(started);
        }
        let (times, moved) = (times.percentiles(), count as u64);
        let down = moved * ANSWER_BYTES;
        self.ask(&mut used, web, down, moved).await?;
        Ok(used.behind(format!("{count} requests on one tunnel, {times}")))
    }

    /// Opens `count` tunnels in sequence, with one request on each.
    ///
    /// # Errors
    /// A wrong answer, or a tunnel that does not open.
    pub(super) async fn dials(&self, count: usize) -> anyhow::Result<String> {
        let (times, mut used) = (Samples::default(), Used::default());
        for number in 1..=count {
            let started = Instant::now();
            let at = || format!("tunnel {number} of {count}");
            let mut client = self.open(self.world.web).await.with_context(at)?;
            let text = client.page("/").await.with_context(at)?;
            ensure!(text == GREETING, "answer {number} is {text:?}");
            times.add(started);
            self.ask(&mut used, self.world.web, ANSWER_BYTES, 1)
                .await
                .with_context(at)?;
        }
        let times = times.percentiles();
        Ok(used.behind(format!("{count} times dial, request, close, {times}")))
    }

    /// A refused dial must return the agent's own text and the matching status.
    async fn refusal(&self) -> anyhow::Result<String> {
        let target = self.world.closed;
        let expected = format!("dial tcp {target}: connect: connection refused");
        let (status, text) = match self.frontend.open(target, &self.world.tasks).await {
            Ok(_tunnel) => bail!("a tunnel to {target}, where nothing listens"),
            Err(OpenError::Refused { status, text }) => (status, text),
            Err(error) => return Err(error.into()),
        };
        ensure!(
            text == expected,
            "refused with {text:?} instead of {expected:?}"
        );
        match status {
            None => Ok(format!("{text:?}")),
            Some(502) => Ok(format!("502, {text:?}")),
            Some(other) => bail!("status {other} instead of 502"),
        }
    }

    /// Each target is reached by the agent that claims its address, and by no other agent.
    async fn path(&self) -> anyhow::Result<String> {
        let (mut ways, mut used) = (Vec::new(), Used::default());
        for target in [self.world.web, self.world.bulk] {
            let agent = self
                .world
                .agent_of(target)
                .with_context(|| format!("no agent claims {target}"))?;
            let before: Vec<u64> = self.world.agents.iter().map(|a| a.dials()).collect();
            let mut client = self.open(target).await?;
            client.page("/").await?;
            self.ask(&mut used, target, ANSWER_BYTES, 1).await?;
            for (other, before) in self.world.agents.iter().zip(before) {
                let (dials, due) = (other.dials() - before, u64::from(other.name == agent.name));
                ensure!(
                    dials == due,
                    "agent {} dialled {dials} times for {target} instead of {due}",
                    other.name
                );
            }
            ways.push(format!("agent {} -> {target}", agent.name));
        }
        Ok(used.behind(format!(
            "frontend -> router -> lane or link -> {}",
            ways.join(" | ")
        )))
    }
}

impl Driver<'_> {
    /// Paths of this frontend's tunnels. Waits first, so that the counters include tunnels on lanes.
    async fn ways(&self, before: Counters) -> anyhow::Result<String> {
        let world = self.world;
        wait_until(LEFTOVER_PATIENCE, || world.series(OPEN_TUNNELS) == 0).await;
        let ways = Counters::of(world).since(before);
        ensure!(ways.on_lanes() > 0, "no tunnel found a lane: {ways}");
        Ok(ways.to_string())
    }
}

fn speed(length: u64, started: Instant) -> String {
    let millis = started.elapsed().as_millis().max(1);
    let rate = u64::try_from(u128::from(length) * 1000 / millis).unwrap_or(u64::MAX);
    let (length, rate) = (bytes(length), bytes(rate));
    format!("{length}, every byte compared, {rate}/s")
}

async fn links(world: &World) -> anyhow::Result<String> {
    let (links, credit) = (world.server.links(), world.series(CREDIT_LINKS));
    let agents = world.agents.len();
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
        (world.series(OPEN_TUNNELS), targets)
    };
    wait_until(LEFTOVER_PATIENCE, || open() == (0, 0)).await;
    let (tunnels, targets) = open();
    ensure!(
        (tunnels, targets) == (0, 0),
        "{tunnels} tunnels and {targets} target connections are still open after {LEFTOVER_PATIENCE:?}"
    );
    let all = world.series(TUNNELS);
    Ok(format!("none of {all} tunnels is left open"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn verdict_names_the_failed_step() {
        let screen = Screen::new(true);
        let verdict = Verdict::default();
        let mut steps = Steps {
            screen: &screen,
            verdict,
        };
        steps.step("good", async { Ok("fine".to_owned()) }).await;
        steps.step("bad", async { bail!("byte 7 is wrong") }).await;
        assert_eq!(steps.verdict.right, 1);
        assert_eq!(steps.verdict.wrong, ["bad: byte 7 is wrong"]);
    }

    #[tokio::test(start_paused = true)]
    async fn step_that_never_ends_fails() {
        let screen = Screen::new(true);
        let verdict = Verdict::default();
        let mut steps = Steps {
            screen: &screen,
            verdict,
        };
        steps.step("stuck", std::future::pending()).await;
        assert_eq!(steps.verdict.wrong, ["stuck: not done after 60s"]);
    }
}
