//! kill -9 in the middle of the bytes: what had arrived at either end is right to the last byte, what was cut is counted with
//! its cause by whoever is left, and the tunnels of everybody else go on.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use super::processes::Processes;
use crate::support::patterned::{self, Load};
use crate::support::process::{Process, at_least, metric, value};
use crate::support::wait::{until, within};

const LINKS: &str = "adit_links{peer=\"adit\"}";
const IDLE: &str = "adit_lanes{state=\"idle\"}";
const TUNNELS: &str = "konnectivity_network_proxy_server_established_connections";
const TARGETS: &str = "konnectivity_network_proxy_agent_open_endpoint_connections";
/// Lanes that an agent keeps ready.
const WARM: f64 = 4.0;
/// Tunnels that are cut, half of them in each dialect, and that go on.
const CUT: u32 = 8;
const KEPT: u32 = 4;
/// So much has passed before anything is killed, so all of it is under load.
const BEFORE: u64 = 4 << 20;
/// So much has to pass afterwards.
const AFTER: u64 = 4 << 20;
/// Tells this binary to be the client that is killed.
const CLIENT: &str = "ADIT_TEST_CLIENT";

/// What tunnels travel on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum On {
    Lanes,
    Link,
}

impl On {
    /// Server's flags, then agent's.
    fn flags(self) -> [&'static [&'static str]; 2] {
        match self {
            Self::Lanes => [&[], &[]],
            Self::Link => [&["--lanes-per-link=0"], &["--lanes=0"]],
        }
    }

    /// Waits for the lanes of so many agents, if there are to be any.
    async fn ready(self, health: SocketAddr, agents: f64) {
        if self == Self::Lanes {
            at_least(health, IDLE, agents * WARM).await;
        }
    }
}

fn closed(reason: &str) -> String {
    format!("adit_tunnels_closed_total{{reason=\"{reason}\"}}")
}

/// Waits until a process has counted all that were cut under these causes, and says how many under each.
async fn causes<const N: usize>(health: SocketAddr, reasons: [&str; N]) -> [f64; N] {
    within(&format!("{CUT} tunnels cut as {reasons:?}"), async {
        loop {
            let mut found = [0.0; N];
            for (count, reason) in found.iter_mut().zip(reasons) {
                *count = value(health, &closed(reason)).await;
            }
            if found.iter().sum::<f64>() >= f64::from(CUT) {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await
}

async fn load(processes: &Processes, target: &str, tunnels: u32) -> Load {
    let world = &processes.world;
    Load::start(&world.connect(), &world.grpc(), target, tunnels.into()).await
}

/// Rule 15.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_of_a_killed_agents_tunnels_are_right_up_to_the_cut_and_other_agents_tunnels_go_on() {
    for on in [On::Lanes, On::Link] {
        let [server_flags, agent_flags] = on.flags();
        let flags = [&["--proxy-strategies=destHost"], server_flags].concat();
        let processes = Processes::start(&flags).await;
        let health = processes.health;
        let agent = |id: &str, address: &str| {
            let identifiers = format!("--agent-identifiers=ipv4={address}");
            processes.agent(id, &[&[identifiers.as_str()], agent_flags].concat())
        };
        let (mut killed, _kept) = (agent("killed", "127.0.0.1"), agent("kept", "127.0.0.2"));
        metric(health, LINKS, 2.0).await;
        on.ready(health, 2.0).await;
        let (port, _target, seen) = patterned::target().await;
        let mut doomed = load(&processes, &format!("127.0.0.1:{port}"), CUT).await;
        let mut others = load(&processes, &format!("127.0.0.2:{port}"), KEPT).await;
        doomed.moves(BEFORE).await;
        others.moves(BEFORE).await;

        killed.kill();
        doomed.ended().await;
        others.moves(AFTER).await;
        others.assert_open();
        let [lanes, link] = causes(health, ["lane_lost", "link_lost"]).await;
        assert_eq!(lanes + link, f64::from(CUT), "{on:?}");
        assert_eq!(lanes > 0.0, on == On::Lanes, "{lanes} on lanes");
        metric(health, TUNNELS, f64::from(KEPT)).await;
        for reason in ["client_gone", "target_reset", "other"] {
            assert_eq!(
                value(health, &closed(reason)).await,
                0.0,
                "{on:?}: {reason}"
            );
        }
        doomed.ledger.assert_intact("clients of the killed agent");
        others.ledger.assert_intact("clients of the other agent");
        seen.assert_intact("the target");
        // What came back had been there.
        assert!(seen.right() >= doomed.ledger.right());
    }
}

/// Rule 15. The agent has two servers, and tunnels of both.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_of_a_killed_servers_tunnels_are_right_up_to_the_cut_and_other_servers_tunnels_go_on()
{
    for on in [On::Lanes, On::Link] {
        let [server_flags, agent_flags] = on.flags();
        let mut processes = Processes::start(server_flags).await;
        let dir = processes.world.dir.path();
        let args: Vec<String> = processes
            .world
            .server_args("0")
            .iter()
            .map(|arg| arg.replace(".sock", ".other"))
            .collect();
        let other = Process::start("other", &args, dir);
        let other_health = other.address("health");
        let both = format!("--proxy-server-host={}", other.address("agents"));
        let agent = processes.agent("a", &[&[both.as_str()], agent_flags].concat());
        let agent_health = agent.address("health");
        for health in [processes.health, other_health] {
            metric(health, LINKS, 1.0).await;
            on.ready(health, 1.0).await;
        }
        let (port, _target, seen) = patterned::target().await;
        let target = format!("127.0.0.1:{port}");
        let mut doomed = load(&processes, &target, CUT).await;
        let sockets = ["connect.other", "grpc.other"].map(|name| dir.join(name));
        let mut others = Load::start(&sockets[0], &sockets[1], &target, KEPT.into()).await;
        doomed.moves(BEFORE).await;
        others.moves(BEFORE).await;
        metric(agent_health, TARGETS, f64::from(CUT + KEPT)).await;

        processes.server.kill();
        doomed.ended().await;
        others.moves(AFTER).await;
        others.assert_open();
        metric(agent_health, TARGETS, f64::from(KEPT)).await;
        let [lanes, link] = causes(agent_health, ["lane_lost", "link_lost"]).await;
        assert_eq!(lanes + link, f64::from(CUT), "{on:?}");
        assert_eq!(lanes > 0.0, on == On::Lanes, "{lanes} on lanes");
        metric(other_health, TUNNELS, f64::from(KEPT)).await;
        doomed.ledger.assert_intact("clients of the killed server");
        others.ledger.assert_intact("clients of the other server");
        seen.assert_intact("the target");
        assert!(seen.right() >= doomed.ledger.right());
    }
}

/// The part of a client that is to be killed: does nothing unless asked to.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_to_be_killed_drives_its_tunnels() {
    let Ok(task) = std::env::var(CLIENT) else {
        return;
    };
    let task: Value = serde_json::from_str(&task).expect("a task");
    let word = |name: &str| task[name].as_str().expect("a word").to_owned();
    let (http, grpc) = (PathBuf::from(word("http")), PathBuf::from(word("grpc")));
    let mut load = Load::start(&http, &grpc, &word("target"), CUT.into()).await;
    load.moves(BEFORE).await;
    load.ledger.assert_intact("the client");
    eprintln!("{CLIENT} is at it");
    load.ended().await;
    panic!("its tunnels have ended before it was killed");
}

/// Rule 15. The kernel closes what the client had open, in the middle of bytes both ways.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_of_a_killed_clients_tunnels_are_right_up_to_the_cut_and_other_clients_tunnels_go_on()
{
    for on in [On::Lanes, On::Link] {
        let [server_flags, agent_flags] = on.flags();
        let processes = Processes::start(server_flags).await;
        let agent = processes.agent("a", agent_flags);
        let (health, agent_health) = (processes.health, agent.address("health"));
        metric(health, LINKS, 1.0).await;
        on.ready(health, 1.0).await;
        let (port, _target, seen) = patterned::target().await;
        let target = format!("127.0.0.1:{port}");
        let world = &processes.world;
        let mut others = load(&processes, &target, KEPT).await;
        let task = json!({"http": world.connect(), "grpc": world.grpc(), "target": target});
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
        until("the client is at it", || client.log().contains("is at it")).await;
        others.moves(BEFORE).await;

        client.kill();
        others.moves(AFTER).await;
        others.assert_open();
        assert!(!client.log().contains("panicked"), "{}", client.log());
        let [gone] = causes(health, ["client_gone"]).await;
        assert_eq!(gone, f64::from(CUT), "{on:?}");
        metric(health, TUNNELS, f64::from(KEPT)).await;
        metric(agent_health, TARGETS, f64::from(KEPT)).await;
        for reason in ["lane_lost", "link_lost", "target_reset", "other"] {
            assert_eq!(
                value(health, &closed(reason)).await,
                0.0,
                "{on:?}: {reason}"
            );
        }
        others.ledger.assert_intact("the other client");
        seen.assert_intact("the target");
        assert!(seen.right() >= others.ledger.right());
    }
}
