//! The admin socket: access control, and a status that matches tunnels and metrics.

use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use adit::agent::RunningAgent;
use adit::status::Socket;
use adit::status::model::{LinkStatus, Role, Status, TunnelStatus, Tunnels};

use crate::support::blocking;
use crate::support::lanes::{IDLE, value, warm};
use crate::support::raw::Connection;
use crate::support::skip::skip_unprivileged;
use crate::support::wait::until;
use crate::support::world::{World, echo};
use crate::support::{connect, targets};

/// Limit for one run of a program.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(20);
/// A user id that is neither root nor the user of the tests.
const NOBODY: u32 = 65_534;

fn agent_socket(world: &World) -> PathBuf {
    world.dir.path().join("agent-admin.sock")
}

/// Server and agent `agent-1`, each with an admin socket.
async fn watched(flags: &[&str]) -> (World, RunningAgent) {
    let server_flags = [&["--admin-socket={certs}/admin.sock"], flags].concat();
    let world = World::start(&server_flags).await;
    let socket = format!("--admin-socket={}", agent_socket(&world).display());
    let agent = world
        .agent("agent-1", &[&[socket.as_str()], flags].concat())
        .await;
    world.links(1).await;
    (world, agent)
}

fn status(socket: &Path) -> Status {
    Socket::new(socket).ask("/v1/status").expect("an answer")
}

fn tunnels(socket: &Path) -> Vec<TunnelStatus> {
    let answer: Tunnels = Socket::new(socket)
        .ask("/v1/tunnels?sort=age")
        .expect("an answer");
    assert_eq!(answer.open, answer.tunnels.len() as u64);
    answer.tunnels
}

/// The only tunnel of this process, once its byte counts reach these values.
async fn settled(socket: &Path, to_target: u64, to_client: u64) -> TunnelStatus {
    let look = || match &tunnels(socket)[..] {
        [only] if (only.bytes_to_target, only.bytes_to_client) == (to_target, to_client) => {
            Some(only.clone())
        }
        _ => None,
    };
    until("the bytes of the tunnel", || look().is_some()).await;
    look().expect("it is quiet")
}

fn only_link(status: &Status) -> &LinkStatus {
    match &status.links[..] {
        [link] => link,
        links => panic!("one link: {links:?}"),
    }
}

/// Limit (operations): Bytes of a tunnel in the admin socket | the bytes moved, at both ends, on link, lane and raw
/// lane
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_ends_report_the_bytes_of_each_tunnel_on_its_path() {
    let (target, _echo) = targets::local_echo().await;
    for (flags, path) in [
        (&["--lane-security=plaintext"][..], "raw-lane"),
        (&[], "lane"),
    ] {
        let (world, _agent) = watched(flags).await;
        warm(&world).await;
        let mut stream = connect::open(&world.connect(), &target).await;
        connect::echo(&mut stream, &targets::pattern(0, 1_000_000)).await;
        let here = settled(&world.admin_socket(), 1_000_000, 1_000_000).await;
        let there = settled(&agent_socket(&world), 1_000_000, 1_000_000).await;
        assert_eq!([here.path.as_str(), there.path.as_str()], [path; 2]);
        let ends = [&here, &there].map(|end| end.destination.as_str());
        assert_eq!(ends, [target.as_str(); 2]);
        assert_eq!(here.peer, "agent-1");
        let tenants = [here.tenant.as_str(), there.tenant.as_str()];
        assert_eq!(tenants, ["default"; 2]);
        assert_eq!(here.client.as_deref(), Some("http-connect"));
        let server = status(&world.admin_socket());
        assert_eq!(there.peer, server.id);
        assert_eq!(here.principal, only_link(&server).principal);
        assert!(here.principal.is_some() && there.principal.is_none());
        let raw = u64::from(path == "raw-lane");
        let counts = server.tunnels;
        let seen = (counts.lane, counts.raw_lane, counts.ktls_lane);
        assert_eq!(seen, (1 - raw, raw, 0));
        let relay = &server.relay;
        assert_eq!((relay.tunnels, relay.slots), (raw, raw));
        assert_eq!(
            (server.account.state.as_str(), server.account.reason),
            ("off", None)
        );
        assert_eq!(there.client, None);
        // The first status request asked for the RTT. A framed tunnel reports the RTT when it next moves bytes.
        connect::echo(&mut stream, b"once more").await;
        let again = settled(&world.admin_socket(), 1_000_009, 1_000_009).await;
        assert!(
            again.rtt_micros.is_some_and(|rtt| rtt < 1_000_000),
            "{again:?}"
        );
        assert!(again.retransmits.is_some() && again.id == here.id);
        drop(stream);
        for socket in [world.admin_socket(), agent_socket(&world)] {
            until("the tunnel leaves the table", || {
                tunnels(&socket).is_empty()
            })
            .await;
        }
        // The final counters match the byte counts of the admin socket.
        for direction in ["to_target", "to_client"] {
            let series = format!("adit_tunnel_bytes_total{{direction=\"{direction}\"}}");
            world.server_metric(&series, 1_000_009.0).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grpc_tunnels_and_links_are_reported() {
    let (world, _agent) = watched(&[]).await;
    let (target, _echo) = targets::local_echo().await;
    // An agent without Adit's headers counts as a Go agent.
    let go = Connection::agent(&world).await;
    let _link = go.link("agent-2", "").await;
    world.links(2).await;
    let now = status(&world.admin_socket());
    let kinds: Vec<(&str, &str)> = now
        .links
        .iter()
        .map(|link| (link.peer.as_str(), link.dialect.as_str()))
        .collect();
    assert_eq!(kinds, [("agent-1", "adit"), ("agent-2", "go")]);
    drop((_link, go));
    world.links(1).await;
    warm(&world).await;
    let mut tunnel = world.tunnel(&target).await;
    echo(&mut tunnel, b"seven..").await;
    let told = settled(&world.admin_socket(), 7, 7).await;
    assert_eq!(told.client.as_deref(), Some("grpc"));
    tunnel.close().await.expect("a clean close");
    until("the tunnel leaves the table", || {
        tunnels(&world.admin_socket()).is_empty()
    })
    .await;
}

/// Limit (operations): Bytes of a tunnel in the admin socket
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tunnels_on_the_link_are_reported_by_both_ends() {
    let world = World::start(&["--lanes-per-link=0", "--admin-socket={certs}/admin.sock"]).await;
    let socket = format!("--admin-socket={}", agent_socket(&world).display());
    let _agent = world.agent("agent-1", &[&socket]).await;
    world.links(1).await;
    let (target, _echo) = targets::local_echo().await;
    let mut stream = connect::open(&world.connect(), &target).await;
    connect::echo(&mut stream, &targets::pattern(0, 300_000)).await;
    for socket in [world.admin_socket(), agent_socket(&world)] {
        let told = settled(&socket, 300_000, 300_000).await;
        assert_eq!((told.path.as_str(), told.rtt_micros), ("link", None));
        assert_eq!(
            (told.engine.as_str(), told.driver.as_str()),
            ("copy", "task")
        );
        let now = status(&socket);
        assert_eq!((now.tunnels.open, now.tunnels.link), (1, 1));
        assert_eq!(only_link(&now).tunnels, 1);
        assert_eq!(only_link(&now).lanes, None);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reported_state_matches_the_metrics() {
    let (world, agent) = watched(&[]).await;
    warm(&world).await;
    let here = status(&world.admin_socket());
    assert_eq!((here.role, here.readiness.ready), (Role::Server, true));
    let link = only_link(&here).clone();
    assert_eq!(
        (link.peer.as_str(), link.condition.as_str()),
        ("agent-1", "serving")
    );
    assert!(link.address.starts_with("127.0.0.1:"), "{link:?}");
    assert!(link.principal.is_some_and(|name| name.contains("agent")));
    until("lanes as the metrics have them", || {
        let now = status(&world.admin_socket());
        now.lanes.idle as f64 == value(&world, IDLE) && now.lanes.busy == 0
    })
    .await;
    until("the certificates in use are listed", || {
        let now = status(&world.admin_socket()).certificates;
        let has = |kind: &str| now.iter().any(|one| one.kind == kind);
        has("ca") && has("certificate")
    })
    .await;
    assert!(here.descriptors.in_use > 0 && here.memory.budget_bytes >= 64 << 20);
    let there = status(&agent_socket(&world));
    assert_eq!((there.role, there.id.as_str()), (Role::Agent, "agent-1"));
    assert!(there.readiness.ready);
    let lanes = only_link(&there).lanes.expect("lanes");
    assert!(
        lanes.wanted >= Some(4) && lanes.limit >= lanes.idle,
        "{lanes:?}"
    );
    assert_eq!(only_link(&there).peer, here.id);

    agent.drain();
    until("the link is told to drain", || {
        only_link(&status(&world.admin_socket())).condition == "draining"
    })
    .await;
    assert_eq!(
        only_link(&status(&agent_socket(&world))).condition,
        "draining"
    );
    agent.stop().await;
    until("no link is left", || {
        status(&world.admin_socket()).links.is_empty()
    })
    .await;
    let lonely = status(&world.admin_socket()).readiness;
    assert_eq!(
        lonely.reason.as_deref(),
        Some("no connection to any proxy agent")
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_contain_no_secrets() {
    let (world, _agent) = watched(&[]).await;
    warm(&world).await;
    for question in ["/v1/status", "/v1/tunnels"] {
        let text = Socket::new(&world.admin_socket()).text(question).unwrap();
        for word in ["secret", "PRIVATE", "token", "Bearer"] {
            assert!(!text.contains(word), "{word} in {text}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_variable_names_the_socket_for_every_command() {
    let (world, _agent) = watched(&[]).await;
    let run = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_adit"));
        command
            .args(args)
            .env("ADIT_ADMIN_SOCKET", world.admin_socket());
        let output = command.output().expect("it runs");
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{args:?}: {error}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    // The agent's name in its certificate is beside the id that it claims.
    let shown = run(&["status"]);
    let row = shown.lines().find(|line| line.contains(" agent-1 "));
    assert!(row.is_some_and(|row| row.starts_with("agent ")), "{shown}");
    assert!(shown.contains("\nCERTIFICATE "), "{shown}");
    assert!(run(&["links"]).contains("has proved CN=agent"));
    run(&["top", "--once", "--interval=100ms"]);
    run(&["drain", "--agent=agent-1"]);
    run(&["unlink", "--agent=agent-1"]);
}

/// Limit (operations): Users of the admin socket | its own user and root
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_socket_is_private_to_its_user_and_removed_with_the_server() {
    let mut world = World::start(&["--admin-socket={certs}/admin.sock"]).await;
    let socket = world.admin_socket();
    let file = std::fs::metadata(&socket).expect("the socket");
    assert!(file.file_type().is_socket());
    assert_eq!(file.mode() & 0o7777, 0o600);
    // A socket file that a crash left behind is replaced.
    drop(world);
    world = World::start(&[]).await;
    let stale = world.files.dir().join("stale.sock");
    drop(std::os::unix::net::UnixListener::bind(&stale).expect("a socket"));
    let flag = format!("--admin-socket={}", stale.display());
    let agent = world.agent("agent-1", &[&flag]).await;
    assert_eq!(status(&stale).role, Role::Agent);
    agent.stop().await;
    until("the socket goes", || !stale.exists()).await;
}

/// The output of `program`, run as the user `NOBODY`.
fn as_nobody(program: &Path, args: &[&str]) -> std::io::Result<Output> {
    let mut command = Command::new(program);
    command.args(args).uid(NOBODY).gid(NOBODY);
    // A child that another test forks at this moment may hold the copy open for writing until its exec.
    blocking::until("the copy of the binary", PATIENCE, || {
        match command.output() {
            Err(error) if error.kind() == std::io::ErrorKind::ExecutableFileBusy => None,
            ran => Some(ran),
        }
    })
}

/// Limit (operations): Users of the admin socket
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_users_are_refused_by_file_mode_and_by_peer_credentials() {
    use std::os::unix::fs::PermissionsExt as _;
    if !rustix::process::geteuid().is_root() {
        skip_unprivileged("the admin socket and another user", "this takes root");
        return;
    }
    // Every user may enter this directory, which holds the socket and the binary.
    let open = tempfile::Builder::new()
        .permissions(std::fs::Permissions::from_mode(0o755))
        .tempdir()
        .expect("a directory");
    let socket = open.path().join("admin.sock");
    let flag = format!("--admin-socket={}", socket.display());
    let world = World::start(&[&flag]).await;
    // Other users may lack access to the build directory.
    let program = open.path().join("adit");
    std::fs::copy(env!("CARGO_BIN_EXE_adit"), &program).expect("a copy of the binary");
    if !as_nobody(&program, &["--version"]).is_ok_and(|output| output.status.success()) {
        skip_unprivileged(
            "the admin socket and another user",
            "temporary files are where other users cannot run them",
        );
        return;
    }
    let path = socket.to_str().expect("text");
    for mode in [0o600, 0o666] {
        std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(mode)).unwrap();
        let refused = as_nobody(&program, &["status", "--admin-socket", path]).expect("it runs");
        let text = String::from_utf8_lossy(&refused.stderr);
        assert_eq!(refused.status.code(), Some(1), "{text}");
        assert!(
            text.contains("only the user that runs the process"),
            "{mode:o}: {text}"
        );
        assert!(refused.stdout.is_empty());
    }
    assert_eq!(status(&socket).role, Role::Server);
    // The file mode refused the first attempt. The server refused the second one and counted it.
    let refused = "adit_accept_errors_total{listener=\"admin\"}";
    world.server_metric(refused, 1.0).await;
}
