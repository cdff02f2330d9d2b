//! kill -9 during a transfer. Bytes received before the cut are correct. Surviving processes count each cut tunnel with its
//! cause, and other tunnels continue. Raw lanes are tested with each driver and each mover.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use adit::status::Socket;
use adit::status::model::{TunnelStatus, Tunnels};
use serde_json::{Value, json};

use super::processes::Processes;
use crate::support::lanes::{COPIED, IDLE, LINKS, SPLICED, TARGETS, TUNNELS, ended};
use crate::support::patterned::{self, Load, Sends};
use crate::support::process::{Process, at_least, metric, value};
use crate::support::wait::{until_for, within};
use crate::support::ways::engine_is_possible;

/// Idle lanes that an agent keeps.
const WARM: f64 = 16.0;
/// Tunnels that are cut, half of them in each dialect, and tunnels that continue.
const CUT: u32 = 8;
const KEPT: u32 = 4;
/// Bytes that a load moves before the kill, so that all tunnels are busy, and again afterwards.
const BULK: u64 = 4 << 20;
/// The same for loads of small chunks.
const SMALL_CHUNKS: u64 = 128 << 10;
/// Limit until the relay splices. The time depends on the sizes that the kernel delivers. A client in its own process also
/// opens its tunnels first.
const UNDER_WAY: Duration = Duration::from_secs(120);
/// The server's admin socket.
const ADMIN: &str = "--admin-socket={certs}/admin.sock";
/// Environment variable that makes this binary the client to be killed.
const CLIENT: &str = "ADIT_TEST_CLIENT";

/// The path of tunnels.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum On {
    Lanes,
    Link,
    /// Plaintext raw lanes for HTTP-CONNECT tunnels, moved by this driver of the relay. It copies small chunks and splices
    /// bulk.
    Pipes(&'static str, Sends),
}

const FRAMES: [On; 2] = [On::Lanes, On::Link];
const RAW_LANES: [On; 2] = raw_lanes(Sends::Bulk);
const COPYING_RAW_LANES: [On; 2] = raw_lanes(Sends::SmallChunks);
/// Tunnels opened on raw lanes.
const PIPED: &str = "adit_tunnels_opened_total{path=\"raw-lane\"}";

const fn raw_lanes(sends: Sends) -> [On; 2] {
    [
        On::Pipes("--relay-engine=epoll", sends),
        On::Pipes("--relay-engine=io-uring", sends),
    ]
}

impl On {
    /// Server's flags, then agent's.
    fn flags(self) -> [Vec<&'static str>; 2] {
        match self {
            Self::Lanes => [vec![], vec![]],
            Self::Link => [vec!["--lanes-per-link=0"], vec!["--lanes=0"]],
            Self::Pipes(engine, _) => [(); 2].map(|()| vec!["--lane-security=plaintext", engine]),
        }
    }

    /// Waits for the idle lanes of `agents` agents, unless tunnels use the link.
    async fn ready(self, health: SocketAddr, agents: f64) {
        if self != Self::Link {
            at_least(health, IDLE, agents * WARM).await;
        }
    }

    /// Raw-lane tunnels that a process has opened. Asserts that there are some exactly if this path has them.
    async fn raw_lanes(self, health: SocketAddr) -> f64 {
        let raw_lanes = value(health, PIPED).await;
        let expected = matches!(self, Self::Pipes(..));
        assert_eq!(raw_lanes > 0.0, expected, "{raw_lanes} raw lanes");
        raw_lanes
    }

    /// Whether this host has the driver. If not, reports the test as skipped.
    fn is_possible(self) -> bool {
        let engine = match self {
            Self::Lanes | Self::Link => None,
            Self::Pipes(flag, _) => flag.strip_prefix("--relay-engine="),
        };
        engine.is_none_or(|engine| engine_is_possible(engine, "killed"))
    }

    fn sends(self) -> Sends {
        match self {
            Self::Lanes | Self::Link => Sends::Bulk,
            Self::Pipes(_, sends) => sends,
        }
    }

    /// Waits until a load has moved enough.
    async fn moves(self, load: &Load) {
        let bytes = match self.sends() {
            Sends::Bulk => BULK,
            Sends::SmallChunks => SMALL_CHUNKS,
        };
        load.moves(bytes).await;
    }

    /// Waits until a tunnel newer than number `older` splices, if bulk is sent on raw lanes. The relay splices only after it
    /// has recognized bulk.
    async fn splices(self, admin: &Path, older: u64) {
        if !matches!(self, Self::Pipes(_, Sends::Bulk)) {
            return;
        }
        let spliced = || {
            let mut all = open_tunnels(admin);
            all.retain(|tunnel| tunnel.id > older && tunnel.engine == "splice");
            all
        };
        until_for(UNDER_WAY, "a tunnel with a pipe", || !spliced().is_empty()).await;
        let seen = spliced();
        // Either direction may hold the kernel pipe. Progress of both means that spliced bytes were delivered.
        let goes_on = |now: &TunnelStatus| {
            seen.iter().any(|then| {
                then.id == now.id
                    && then.bytes_to_target < now.bytes_to_target
                    && then.bytes_to_client < now.bytes_to_client
            })
        };
        until_for(UNDER_WAY, "its bytes go on", || {
            spliced().iter().any(goes_on)
        })
        .await;
    }

    /// Asserts that a process has counted no tunnel under these causes.
    async fn assert_none_ended(self, health: SocketAddr, reasons: &[&str]) {
        for reason in reasons {
            let count = value(health, &ended(reason)).await;
            assert_eq!(count, 0.0, "{self:?}: {reason}");
        }
    }

    /// Asserts by the counters of a surviving process that the expected movers were used.
    async fn assert_moved(self, health: SocketAddr) {
        let (copied, spliced) = (value(health, COPIED).await, value(health, SPLICED).await);
        let expected = match self {
            Self::Lanes | Self::Link => (false, false),
            // Bulk is also copied, until the relay recognizes it.
            Self::Pipes(_, sends) => (true, sends == Sends::Bulk),
        };
        assert_eq!(
            (copied > 0.0, spliced > 0.0),
            expected,
            "{self:?}: {copied} bytes copied, {spliced} spliced"
        );
    }
}

/// The open tunnels of a process, the oldest first.
fn open_tunnels(admin: &Path) -> Vec<TunnelStatus> {
    let answer = Socket::new(admin).ask::<Tunnels>("/v1/tunnels?sort=age");
    answer.expect("an answer").tunnels
}

/// Waits until a process has counted `CUT` tunnels under these causes. Returns the count of each cause.
async fn causes<const N: usize>(health: SocketAddr, reasons: [&str; N]) -> [f64; N] {
    within(&format!("{CUT} tunnels cut as {reasons:?}"), async {
        loop {
            let mut found = [0.0; N];
            for (count, reason) in found.iter_mut().zip(reasons) {
                *count = value(health, &ended(reason)).await;
            }
            if found.iter().sum::<f64>() >= f64::from(CUT) {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await
}

async fn load(on: On, processes: &Processes, target: &str, tunnels: u32) -> Load {
    let (http, grpc) = (processes.world.connect(), processes.world.grpc());
    Load::start(&http, &grpc, target, tunnels.into(), on.sends()).await
}

async fn agent_is_killed(on: [On; 2]) {
    for on in on.into_iter().filter(|on| on.is_possible()) {
        let [server_flags, agent_flags] = on.flags();
        let flags = [&["--proxy-strategies=destHost", ADMIN], &server_flags[..]].concat();
        let processes = Processes::start(&flags).await;
        let health = processes.health;
        let admin = processes.world.admin_socket();
        let agent = |id: &str, address: &str| {
            let identifiers = format!("--agent-identifiers=ipv4={address}");
            processes.agent(id, &[&[identifiers.as_str()], &agent_flags[..]].concat())
        };
        let (mut killed, _kept) = (agent("killed", "127.0.0.1"), agent("kept", "127.0.0.2"));
        metric(health, LINKS, 2.0).await;
        on.ready(health, 2.0).await;
        let (port, _target, seen) = patterned::target().await;
        let mut doomed = load(on, &processes, &format!("127.0.0.1:{port}"), CUT).await;
        on.moves(&doomed).await;
        on.splices(&admin, 0).await;
        let raw_lanes = on.raw_lanes(health).await;
        on.ready(health, 2.0).await;
        let mut others = load(on, &processes, &format!("127.0.0.2:{port}"), KEPT).await;
        on.moves(&others).await;
        assert_eq!(on.raw_lanes(health).await > raw_lanes, raw_lanes > 0.0);

        killed.kill();
        doomed.ended().await;
        on.moves(&others).await;
        others.assert_open();
        // A raw lane shows only the kernel's RST.
        let reasons = ["lane_lost", "link_lost", "target_reset"];
        let [lanes, link, reset] = causes(health, reasons).await;
        on.assert_moved(health).await;
        assert_eq!(lanes + link + reset, f64::from(CUT), "{on:?}");
        assert_eq!(lanes > 0.0, on != On::Link, "{lanes} on lanes");
        assert_eq!(reset, raw_lanes, "{on:?}");
        metric(health, TUNNELS, f64::from(KEPT)).await;
        on.assert_none_ended(health, &["client_gone", "other"])
            .await;
        doomed.ledger.assert_intact("clients of the killed agent");
        others.ledger.assert_intact("clients of the other agent");
        seen.assert_intact("the target");
        // The target received at least what the clients got back.
        assert!(seen.right() >= doomed.ledger.right());
    }
}

/// Limit (isolation): Tunnel bytes when an agent, server or client is killed | right up to the cut, on every path;
/// tunnels of others continue
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_of_a_killed_agents_tunnels_are_right_up_to_the_cut_and_other_agents_tunnels_go_on() {
    agent_is_killed(FRAMES).await;
}

/// Limit (isolation): Tunnel bytes when an agent, server or client is killed
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_of_a_killed_agents_raw_lanes_are_right_up_to_the_cut_and_other_agents_go_on() {
    agent_is_killed(RAW_LANES).await;
}

/// Limit (isolation): Tunnel bytes when an agent, server or client is killed
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_that_relays_copy_are_right_up_to_the_cut_of_a_killed_agent() {
    agent_is_killed(COPYING_RAW_LANES).await;
}

/// The agent has two servers, with tunnels through both.
async fn server_is_killed(on: [On; 2]) {
    for on in on.into_iter().filter(|on| on.is_possible()) {
        let [server_flags, agent_flags] = on.flags();
        let mut processes = Processes::start(&server_flags).await;
        let dir = processes.world.dir.path();
        let args = processes.world.other_args("0", ".other");
        let other = Process::start("other", &args, dir);
        let other_health = other.address("health");
        let both = format!("--proxy-server-host={}", other.address("agents"));
        let admin = dir.join("agent-admin.sock");
        let admin_flag = format!("--admin-socket={}", admin.display());
        let own_flags = [both.as_str(), admin_flag.as_str()];
        let agent = processes.agent("a", &[&own_flags[..], &agent_flags[..]].concat());
        let agent_health = agent.address("health");
        for health in [processes.health, other_health] {
            metric(health, LINKS, 1.0).await;
            on.ready(health, 1.0).await;
        }
        let (port, _target, seen) = patterned::target().await;
        let target = format!("127.0.0.1:{port}");
        let mut doomed = load(on, &processes, &target, CUT).await;
        on.moves(&doomed).await;
        on.splices(&admin, 0).await;
        let raw_lanes = on.raw_lanes(agent_health).await;
        let sockets = ["connect.other", "grpc.other"].map(|name| dir.join(name));
        let [http, grpc] = &sockets;
        let mut others = Load::start(http, grpc, &target, KEPT.into(), on.sends()).await;
        on.moves(&others).await;
        on.raw_lanes(other_health).await;
        metric(agent_health, TARGETS, f64::from(CUT + KEPT)).await;

        processes.server.kill();
        doomed.ended().await;
        on.moves(&others).await;
        others.assert_open();
        metric(agent_health, TARGETS, f64::from(KEPT)).await;
        // On a raw lane the agent cannot tell a killed server from a client that disconnects.
        let reasons = ["lane_lost", "link_lost", "client_gone"];
        let [lanes, link, reset] = causes(agent_health, reasons).await;
        on.assert_moved(agent_health).await;
        assert_eq!(lanes + link + reset, f64::from(CUT), "{on:?}");
        assert_eq!(lanes > 0.0, on != On::Link, "{lanes} on lanes");
        assert_eq!(reset, raw_lanes, "{on:?}");
        metric(other_health, TUNNELS, f64::from(KEPT)).await;
        doomed.ledger.assert_intact("clients of the killed server");
        others.ledger.assert_intact("clients of the other server");
        seen.assert_intact("the target");
        assert!(seen.right() >= doomed.ledger.right());
    }
}

/// Limit (isolation): Tunnel bytes when an agent, server or client is killed
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_of_a_killed_servers_tunnels_are_right_up_to_the_cut_and_other_servers_tunnels_go_on()
{
    server_is_killed(FRAMES).await;
}

/// Limit (isolation): Tunnel bytes when an agent, server or client is killed
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_of_a_killed_servers_raw_lanes_are_right_up_to_the_cut_and_other_servers_go_on() {
    server_is_killed(RAW_LANES).await;
}

/// Limit (isolation): Tunnel bytes when an agent, server or client is killed
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_that_relays_copy_are_right_up_to_the_cut_of_a_killed_server() {
    server_is_killed(COPYING_RAW_LANES).await;
}

/// Body of the client process to be killed. Does nothing without `CLIENT`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_to_be_killed_drives_its_tunnels() {
    let Ok(task) = std::env::var(CLIENT) else {
        return;
    };
    let task: Value = serde_json::from_str(&task).expect("a task");
    let word = |name: &str| task[name].as_str().expect("a word").to_owned();
    let (http, grpc) = (PathBuf::from(word("http")), PathBuf::from(word("grpc")));
    let small_chunks = task["small_chunks"].as_bool().expect("yes or no");
    let (sends, enough) = if small_chunks {
        (Sends::SmallChunks, SMALL_CHUNKS)
    } else {
        (Sends::Bulk, BULK)
    };
    let mut load = Load::start(&http, &grpc, &word("target"), CUT.into(), sends).await;
    load.moves(enough).await;
    load.ledger.assert_intact("the client");
    eprintln!("{CLIENT} is at it");
    load.ended().await;
    panic!("its tunnels have ended before it was killed");
}

/// The kernel closes the client's sockets during transfers in both directions.
async fn client_is_killed(on: [On; 2]) {
    for on in on.into_iter().filter(|on| on.is_possible()) {
        let [server_flags, agent_flags] = on.flags();
        let flags = [&[ADMIN], &server_flags[..]].concat();
        let processes = Processes::start(&flags).await;
        let admin = processes.world.admin_socket();
        let agent = processes.agent("a", &agent_flags);
        let (health, agent_health) = (processes.health, agent.address("health"));
        metric(health, LINKS, 1.0).await;
        on.ready(health, 1.0).await;
        let (port, _target, seen) = patterned::target().await;
        let target = format!("127.0.0.1:{port}");
        let world = &processes.world;
        let mut others = load(on, &processes, &target, KEPT).await;
        on.moves(&others).await;
        let raw_lanes = on.raw_lanes(health).await;
        on.ready(health, 1.0).await;
        let newest = open_tunnels(&admin).last().map(|tunnel| tunnel.id);
        let newest = newest.expect("the other client's");
        let task = json!({
            "http": world.connect(),
            "grpc": world.grpc(),
            "target": target,
            "small_chunks": on.sends() == Sends::SmallChunks,
        });
        let this = std::env::current_exe().expect("it");
        let mut command = Command::new(this);
        command
            .args([
                "--exact",
                "cases::killed::client_to_be_killed_drives_its_tunnels",
            ])
            .args(["--nocapture", "--test-threads=1"])
            .env(CLIENT, task.to_string());
        let mut client = Process::start_command("client", command, world.dir.path());
        until_for(UNDER_WAY, "the client is at it", || {
            client.log().contains("is at it")
        })
        .await;
        on.moves(&others).await;
        on.splices(&admin, newest).await;
        assert_eq!(on.raw_lanes(health).await > raw_lanes, raw_lanes > 0.0);

        client.kill();
        on.moves(&others).await;
        others.assert_open();
        assert!(!client.log().contains("panicked"), "{}", client.log());
        let [gone] = causes(health, ["client_gone"]).await;
        on.assert_moved(health).await;
        assert_eq!(gone, f64::from(CUT), "{on:?}");
        metric(health, TUNNELS, f64::from(KEPT)).await;
        metric(agent_health, TARGETS, f64::from(KEPT)).await;
        let reasons = ["lane_lost", "link_lost", "target_reset", "other"];
        on.assert_none_ended(health, &reasons).await;
        others.ledger.assert_intact("the other client");
        seen.assert_intact("the target");
        assert!(seen.right() >= others.ledger.right());
    }
}

/// Limit (isolation): Tunnel bytes when an agent, server or client is killed
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_of_a_killed_clients_tunnels_are_right_up_to_the_cut_and_other_clients_tunnels_go_on()
{
    client_is_killed(FRAMES).await;
}

/// Limit (isolation): Tunnel bytes when an agent, server or client is killed
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_of_a_killed_clients_raw_lanes_are_right_up_to_the_cut_and_other_clients_go_on() {
    client_is_killed(RAW_LANES).await;
}

/// Limit (isolation): Tunnel bytes when an agent, server or client is killed
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_that_relays_copy_are_right_up_to_the_cut_of_a_killed_client() {
    client_is_killed(COPYING_RAW_LANES).await;
}
