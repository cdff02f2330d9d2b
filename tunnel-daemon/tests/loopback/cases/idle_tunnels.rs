//! As many idle tunnels as a process has descriptors for: on lanes first, on the link from there on, none refused, and each
//! of them cheap. Server, agent, clients and targets are processes of their own: servers of other tests would find theirs
//! short of descriptors.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tempfile::TempDir;
use tokio::net::UnixStream;
use tokio::task::JoinSet;

use super::lane_processes::nightly;
use crate::support::process::{
    Process, at_least, descriptors_without_lanes, metric, no_descriptor_left, scrape, value,
};
use crate::support::wait::{until_blocking, within_for};
use crate::support::world::{World, sample};
use crate::support::{connect, targets};

const IDLE: &str = "adit_lanes{state=\"idle\"}";
const BUSY: &str = "adit_lanes{state=\"busy\"}";
const BY_LANE: &str = "adit_tunnels_opened_total{path=\"lane\"}";
const BY_LINK: &str = "adit_tunnels_opened_total{path=\"link\"}";
const TUNNELS: &str = "konnectivity_network_proxy_server_established_connections";
const TARGETS: &str = "konnectivity_network_proxy_agent_open_endpoint_connections";

/// What this program is started for, by name.
const ROLE: &str = "ADIT_TEST_ROLE_OF_IDLE_TUNNELS";
const CLIENTS: &str = "clients";
const TARGETS_APART: &str = "targets";
/// What the targets say of their port.
const LISTENS: (&str, &str) = ("targets at port ", " are there");
/// They are killed long before, unless the process that started them was.
const TARGETS_LAST: Duration = Duration::from_secs(25 * 60);
/// What the clients say at the end.
const ALL_SERVED: &str = "all idle tunnels were served";
/// More than all limits of the clients together: their own say what did not happen, and end what they started.
const CLIENTS_WITHIN: Duration = Duration::from_secs(20 * 60);

/// Lanes that are always warm, so that as many dials find one.
const WARM: u32 = 4;
/// Most lanes of one link, unless flags say otherwise.
const LANES_PER_LINK: u32 = 4096;
/// Clients that dial at the same time where no lane is waited for.
const AT_ONCE: u32 = 8;
/// Of either process, for one tunnel. A buffer of 64 KiB for each would be more.
const RESIDENT_MAX_BYTES: u64 = 48 << 10;
/// Opening or asking all of them.
const ALL_WITHIN: Duration = Duration::from_secs(240);

/// This program, to run one of the tests here in that role.
fn apart(role: &str, test: &str, dir: &Path) -> Process {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command
        .args(["--exact", &format!("cases::idle_tunnels::{test}")])
        .args(["--nocapture", "--test-threads=1"])
        .env(ROLE, role);
    Process::start_command(role, command, dir)
}

fn is_asked_to_be(role: &str) -> bool {
    std::env::var_os(ROLE).is_some_and(|asked| asked == role)
}

/// Descriptors for the clients, of whom each has one, and whatever a process has.
fn raise_limit(clients: u32) {
    let limit = getrlimit(Resource::Nofile);
    let enough = limit
        .maximum
        .is_none_or(|most| most >= u64::from(clients) + 256);
    assert!(enough, "{clients} clients need a higher limit: {limit:?}");
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    setrlimit(Resource::Nofile, raised).expect("up to the hard limit");
}

/// A process that echoes, and its port.
fn targets_apart(dir: &Path) -> (Process, u16) {
    let process = apart(TARGETS_APART, "targets_of_idle_tunnels_answer", dir);
    let port = |line: &str| {
        let port = line.strip_prefix(LISTENS.0)?.strip_suffix(LISTENS.1)?;
        port.parse::<u16>().ok()
    };
    let port = until_blocking("targets", Duration::from_secs(20), || {
        process.log().lines().find_map(port)
    });
    (process, port)
}

/// The part of the targets: does nothing unless asked to.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn targets_of_idle_tunnels_answer() {
    if !is_asked_to_be(TARGETS_APART) {
        return;
    }
    raise_limit(nightly(10_000, 2_000));
    let (port, _echo) = targets::echo().await;
    eprintln!("{}{port}{}", LISTENS.0, LISTENS.1);
    let _over = tokio::time::timeout(TARGETS_LAST, std::future::pending::<()>()).await;
}

/// So many tunnels, some at a time.
async fn open_some(socket: &Path, target: &str, count: u32) -> Vec<UnixStream> {
    let mut jobs = JoinSet::new();
    for worker in 0..AT_ONCE {
        let (socket, target) = (socket.to_owned(), target.to_owned());
        jobs.spawn(async move {
            let mut open = Vec::new();
            for _tunnel in (worker..count).step_by(AT_ONCE as usize) {
                open.push(connect::open(&socket, &target).await);
            }
            open
        });
    }
    jobs.join_all().await.into_iter().flatten().collect()
}

#[test]
fn as_many_idle_tunnels_as_descriptors_allow_are_on_lanes_and_none_is_refused() {
    let dir = TempDir::new().expect("a directory");
    let mut clients = apart(
        CLIENTS,
        "clients_of_idle_tunnels_are_all_served",
        dir.path(),
    );
    let status = clients.end(CLIENTS_WITHIN);
    assert!(status.success(), "{status}");
    assert!(clients.log().contains(ALL_SERVED), "the test is not there");
}

/// The test itself: does nothing unless asked to.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_of_idle_tunnels_are_all_served() {
    if !is_asked_to_be(CLIENTS) {
        return;
    }
    let (tunnels, limit) = nightly((10_000, 20_000), (2_000, 4_000_u32));
    // A third of what is left for lanes, clients and targets, so that all tunnels find room.
    let lanes_max = LANES_PER_LINK.min((limit - 512) / 3);
    // Nearly all: a dial does not wait for the last ones.
    let on_lanes = lanes_max - lanes_max / 10;
    raise_limit(tunnels);
    let mut world = World::start(&["--log-format=json"]).await;
    world.stop_server(Duration::ZERO).await;
    let dir = world.dir.path().to_owned();
    let (_targets, port) = targets_apart(&dir);
    let server = Process::start_limited("server", limit, &world.server_args("0"), &dir);
    let (agents, health) = (server.address("agents"), server.address("health"));
    let args = world.agent_args("a", agents.port(), &["--log-format=json"]);
    let agent = Process::start_limited("agent", limit, &args, &dir);
    let agent_health = agent.address("health");
    at_least(health, IDLE, f64::from(WARM)).await;
    let (socket, target) = (world.connect(), format!("127.0.0.1:{port}"));

    // Once through everything, so that what is opened once for good is open.
    drop(connect::open(&socket, &target).await);
    for (health, series) in [(health, TUNNELS), (health, BUSY), (agent_health, TARGETS)] {
        metric(health, series, 0.0).await;
    }
    let before = [
        descriptors_without_lanes(&server, health).await,
        descriptors_without_lanes(&agent, agent_health).await,
    ];
    let resident = [&server, &agent].map(Process::resident_bytes);
    let opened = [value(health, BY_LANE).await, value(health, BY_LINK).await];

    let mut open = Vec::new();
    within_for(ALL_WITHIN, "tunnels on lanes", async {
        // A dial may miss lanes that the server asks for a sign of life at that moment.
        while value(health, BUSY).await < f64::from(on_lanes) {
            at_least(health, IDLE, f64::from(WARM)).await;
            for _tunnel in 0..WARM {
                open.push(connect::open(&socket, &target).await);
            }
        }
    })
    .await;
    let left = tunnels - u32::try_from(open.len()).expect("fewer than tunnels");
    let rest = open_some(&socket, &target, left);
    open.extend(within_for(ALL_WITHIN, "the other tunnels", rest).await);

    // A tunnel that was refused would have failed the test before.
    metric(health, TUNNELS, f64::from(tunnels)).await;
    metric(agent_health, TARGETS, f64::from(tunnels)).await;
    let text = scrape(health).await;
    let of = |series: &str| sample(&text, series).expect("a series");
    let [by_lane, by_link] = [of(BY_LANE) - opened[0], of(BY_LINK) - opened[1]];
    assert_eq!(by_lane + by_link, f64::from(tunnels));
    assert_eq!(by_lane, of(BUSY), "each has a lane of its own");
    let lanes = f64::from(on_lanes)..=f64::from(lanes_max);
    assert!(
        lanes.contains(&by_lane),
        "{by_lane} on lanes, not {lanes:?}"
    );
    for (program, resident) in [&server, &agent].into_iter().zip(resident) {
        let each = program.resident_bytes().saturating_sub(resident) / u64::from(tunnels);
        assert!(each < RESIDENT_MAX_BYTES, "{each} bytes for each");
        assert!(program.descriptors() < limit as usize);
    }

    within_for(ALL_WITHIN, "an answer on each", async {
        for stream in &mut open {
            connect::echo(stream, b"not forgotten").await;
        }
    })
    .await;
    drop(open);
    for (health, series) in [(health, TUNNELS), (health, BUSY), (agent_health, TARGETS)] {
        metric(health, series, 0.0).await;
    }
    no_descriptor_left(&server, health, before[0]).await;
    no_descriptor_left(&agent, agent_health, before[1]).await;
    eprintln!("{ALL_SERVED}");
}
