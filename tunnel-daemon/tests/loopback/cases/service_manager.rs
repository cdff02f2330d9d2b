//! Sockets and notifications of a service manager, as systemd handles both.

use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::Signal;

use crate::support::process::{Process, metric, program};
use crate::support::world::World;
use crate::support::{connect, targets};

const LINKS: &str = "adit_links{peer=\"adit\"}";
/// Time for an orderly exit, or for a notification on a busy machine.
const LIMIT: Duration = Duration::from_secs(30);

/// The command of a server that a service manager starts: where to notify, and `socket` as a passed socket.
fn command(args: &[String], notify: &Path, socket: &(impl AsFd + AsRawFd)) -> Command {
    // The socket stays open over exec, under its own number.
    fcntl_setfd(socket, FdFlags::empty()).expect("it is open");
    let mut command = Command::new(program());
    command
        .args(&args[1..])
        .env("NOTIFY_SOCKET", notify)
        .env("LISTEN_FDS", "1")
        .env("LISTEN_FDS_FIRST_FD", socket.as_raw_fd().to_string());
    command
}

fn notification(socket: &UnixDatagram) -> String {
    let mut buffer = [0; 512];
    let length = socket.recv(&mut buffer).expect("a notification");
    String::from_utf8_lossy(&buffer[..length]).into_owned()
}

async fn world() -> (World, UnixDatagram, std::path::PathBuf, UnixListener) {
    let mut world = World::start(&["--log-format=json"]).await;
    // The in-process server only chose paths and created files.
    world.stop_server(Duration::ZERO).await;
    let notify = world.dir.path().join("notify.sock");
    let told = UnixDatagram::bind(&notify).expect("a free name");
    told.set_read_timeout(Some(LIMIT)).expect("a timeout");
    let socket = UnixListener::bind(world.connect()).expect("a free name");
    (world, told, notify, socket)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_takes_over_the_socket_of_its_frontend_and_notifies() {
    let (target, _echo) = targets::local_echo().await;
    let (world, told, notify, socket) = world().await;
    let before = std::fs::metadata(world.connect()).expect("a socket");
    let command = command(&world.server_args("0"), &notify, &socket);
    let mut server = Process::start_command("server", command, world.dir.path());
    assert_eq!(notification(&told), "READY=1\n");
    let args = world.agent_args("a", server.address("agents").port(), &["--log-format=json"]);
    let _agent = Process::start("a", &args, world.dir.path());
    metric(server.address("health"), LINKS, 1.0).await;
    let mut stream = connect::open(&world.connect(), &target).await;
    connect::echo(&mut stream, b"through the socket that was passed").await;
    drop(stream);

    server.signal(Signal::TERM);
    assert_eq!(notification(&told), "STOPPING=1\n");
    assert!(server.wait(LIMIT).success());
    // Clients can connect to the socket while no server runs.
    let after = std::fs::metadata(world.connect()).expect("the file of the service manager stays");
    use std::os::unix::fs::MetadataExt as _;
    assert_eq!((before.dev(), before.ino()), (after.dev(), after.ino()));
}

/// `Accept=yes` in a socket unit passes a connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_passed_connection_is_refused() {
    let (world, _told, notify, listener) = world().await;
    let connection = std::os::unix::net::UnixStream::connect(world.connect()).expect("it listens");
    let (accepted, _peer) = listener.accept().expect("a connection");
    let command = command(&world.server_args("0"), &notify, &accepted);
    let mut server = Process::start_command("server", command, world.dir.path());
    assert_eq!(server.wait(LIMIT).code(), Some(1));
    let log = server.log();
    assert!(
        log.contains("cannot be used: it does not listen: leave Accept=yes out"),
        "{log}"
    );
    drop(connection);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unused_passed_socket_is_named() {
    let (world, _told, notify, _socket) = world().await;
    let other = world.dir.path().join("other.sock");
    let socket = UnixListener::bind(&other).expect("a free name");
    std::fs::remove_file(world.connect()).expect("it is there");
    let agent = world.agent_args("a", 1, &["--log-format=json"]);
    for (name, args) in [("server", world.server_args("0")), ("agent", agent)] {
        let command = command(&args, &notify, &socket);
        let mut process = Process::start_command(name, command, world.dir.path());
        assert_eq!(process.wait(LIMIT).code(), Some(1));
        let log = process.log();
        let expected = format!(
            "the service manager passed sockets at which nothing is to listen: {}; give a --frontend",
            other.display()
        );
        assert!(log.contains(&expected), "{log}");
    }
}
