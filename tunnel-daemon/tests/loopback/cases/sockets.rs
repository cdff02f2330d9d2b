//! Large numbers of short connections.

use std::os::unix::net::UnixStream;

use super::lane_processes::nightly;
use crate::support::process::{Process, metric};
use crate::support::wait::{until, within};
use crate::support::world::World;
use crate::support::{connect, targets};

/// The server is a separate process, so that its descriptors belong to no other test.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[expect(clippy::disallowed_methods, reason = "a test on a runtime of its own")]
async fn quick_connects_leave_no_descriptor_or_task_behind() {
    let (target, _echo) = targets::local_echo().await;
    let mut world = World::start(&["--log-format=json"]).await;
    world.stop_server(std::time::Duration::ZERO).await;
    let server = Process::start("server", &world.server_args("0"), world.dir.path());
    let (agents, health) = (server.address("agents"), server.address("health"));
    let args = world.agent_args("a", agents.port(), &["--log-format=json"]);
    let agent = Process::start("agent", &args, world.dir.path());
    metric(health, "adit_links{peer=\"adit\"}", 1.0).await;
    // Each frontend is used once, so that descriptors opened once for good are already open.
    world.assert_serves(&target).await;
    metric(
        health,
        "konnectivity_network_proxy_server_established_connections",
        0.0,
    )
    .await;
    let before = server.descriptors();

    let (grpc, http) = (world.grpc(), world.connect());
    let connecting = tokio::task::spawn_blocking(move || {
        for number in 0..nightly(100_000, 20_000) {
            match number % 10 {
                0 => {
                    let stream = std::net::TcpStream::connect(agents).expect("it listens");
                    // RST instead of TIME_WAIT, in which this host would run out of ports.
                    let socket = socket2::SockRef::from(&stream);
                    socket
                        .set_linger(Some(std::time::Duration::ZERO))
                        .expect("a socket");
                }
                1..5 => drop(UnixStream::connect(&grpc).expect("it listens")),
                _ => drop(UnixStream::connect(&http).expect("it listens")),
            }
        }
    });
    within("all connects", connecting)
        .await
        .expect("no refusal");
    // The server must first notice the sockets that are closed. The scrape's own connection is closed by then, too.
    metric(
        health,
        "konnectivity_network_proxy_server_http_connections",
        0.0,
    )
    .await;
    until("no descriptor is left", || {
        server.descriptors() <= before + 1
    })
    .await;
    metric(health, "adit_links{peer=\"adit\"}", 1.0).await;
    let mut stream = connect::open(&world.connect(), &target).await;
    connect::echo(&mut stream, b"still here").await;
    drop(agent);
}
