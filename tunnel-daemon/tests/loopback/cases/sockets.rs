//! Large numbers of short connections.

use std::os::unix::net::UnixStream;

use super::lane_processes::nightly;
use super::processes::Processes;
use crate::support::lanes::TUNNELS;
use crate::support::process::metric;
use crate::support::wait::{until, within};
use crate::support::{connect, targets};

/// The server is a separate process, so that its descriptors belong to no other test.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[expect(clippy::disallowed_methods, reason = "a test on a runtime of its own")]
async fn quick_connects_leave_no_descriptor_or_task_behind() {
    let (target, _echo) = targets::local_echo().await;
    // Without lanes, which come and go by themselves.
    let (processes, _agent) = Processes::linked(&["--lanes-per-link=0"], &[]).await;
    let (world, server) = (&processes.world, &processes.server);
    let (agents, health) = (processes.agents, processes.health);
    // Each frontend is used once, so that descriptors opened once for good are already open.
    world.assert_serves(&target).await;
    metric(health, TUNNELS, 0.0).await;
    let before = server.descriptors();

    let (grpc, http) = (world.grpc(), world.connect());
    let connecting = tokio::task::spawn_blocking(move || {
        for number in 0..nightly(100_000, 20_000) {
            match number % 10 {
                0 => {
                    let stream = std::net::TcpStream::connect(agents).expect("it listens");
                    // RST instead of TIME_WAIT, in which this host would run out of ports.
                    adit_net::socket::set_reset_on_close(&stream).expect("a socket");
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
    processes.links(1.0).await;
    let mut stream = connect::open(&world.connect(), &target).await;
    connect::echo(&mut stream, b"still here").await;
}
