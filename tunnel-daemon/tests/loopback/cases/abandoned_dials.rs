//! A client that disconnects while its dial is pending cancels that dial at once, at the server and at the agent.

use adit_core::wire::packets::PacketType;
use adit_core::wire::packets::packet::Payload;
use tokio::net::UnixStream;

use crate::support::connect;
use crate::support::process::sum;
use crate::support::raw::{Call, Connection, close_dial, close_request, close_response};
use crate::support::targets;
use crate::support::wait::until;
use crate::support::world::World;

/// Exceeds the limit of every test step, so no dial here ends by timeout.
const DIAL_TIMEOUT: &str = "--dial-timeout=60s";
const PREFIX: &str = "konnectivity_network_proxy_server_";

/// How a client cancels its dial.
#[derive(Clone, Copy, Debug)]
enum Leaves {
    /// HTTP-CONNECT: closes the connection.
    Closing,
    /// gRPC: sends DIAL_CLS, as the Go client library does.
    DialClose,
    /// gRPC: cancels the call.
    Cancelling,
    /// gRPC: half-closes the call.
    Finishing,
    /// gRPC: closes the connection.
    Vanishing,
}

const ALL: [Leaves; 5] = [
    Leaves::Closing,
    Leaves::DialClose,
    Leaves::Cancelling,
    Leaves::Finishing,
    Leaves::Vanishing,
];

/// A client with a pending dial.
enum Client {
    Http(UnixStream),
    Grpc(Box<(Connection, Call)>),
}

/// The client's id of the dial (`random`).
const DIAL: i64 = 4242;

impl Client {
    async fn dial(world: &World, how: Leaves, target: &str) -> Self {
        match how {
            Leaves::Closing => {
                let mut stream = world.client().await;
                connect::say(&mut stream, &connect::head(target)).await;
                Self::Http(stream)
            }
            Leaves::DialClose | Leaves::Cancelling | Leaves::Finishing | Leaves::Vanishing => {
                let (connection, mut call) = Connection::proxied(world).await;
                call.dial(DIAL, target);
                Self::Grpc(Box::new((connection, call)))
            }
        }
    }

    /// Cancels the dial. Returns the client if its connection stays open.
    async fn leave(self, how: Leaves) -> Option<Self> {
        match (self, how) {
            (Self::Http(stream), Leaves::Closing) => {
                drop(stream);
                None
            }
            (Self::Grpc(mut grpc), Leaves::DialClose) => {
                grpc.1.packet(PacketType::DialCls, close_dial(DIAL));
                Some(Self::Grpc(grpc))
            }
            (Self::Grpc(mut grpc), Leaves::Finishing) => {
                grpc.1.finish();
                Some(Self::Grpc(grpc))
            }
            (Self::Grpc(grpc), Leaves::Cancelling) => {
                let (connection, call) = *grpc;
                drop(call);
                // A second call proves that the connection is still open.
                let other = connection.proxy().await;
                Some(Self::Grpc(Box::new((connection, other))))
            }
            (Self::Http(_) | Self::Grpc(..), _) => None,
        }
    }
}

/// Asserts that the server has no pending dial and has counted `dials` cancelled ones.
async fn assert_given_up(world: &World, dials: u32) {
    let given_up = format!("{PREFIX}dial_failure_count{{reason=\"frontend_close\"}}");
    world.server_metric(&given_up, f64::from(dials)).await;
    for gauge in ["pending_backend_dials", "http_connections"] {
        world.server_metric(&format!("{PREFIX}{gauge}"), 0.0).await;
    }
}

/// The agent gets DIAL_CLS. If it answers the dial afterwards, it gets CLOSE_REQ for that connection.
///
/// Upstream (dials): A dial that its client cancels is cancelled at the agent and counted once on both ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dials_cancelled_by_their_clients_are_cancelled_at_the_agent_at_once() {
    let world = World::start(&[DIAL_TIMEOUT]).await;
    let (_agent, mut link) = Connection::linked(&world, "silent", "").await;
    // The first dial creates the gauges that `assert_given_up` reads.
    let used = Client::dial(&world, Leaves::Closing, "first.test:1").await;
    link.dialed().await;
    drop(used);
    let closed = link.payload().await;
    assert!(matches!(closed, Some(Payload::CloseDial(_))), "{closed:?}");
    let (mut given_up, mut conn) = (1, 100);
    for how in ALL {
        let client = Client::dial(&world, how, "silent.test:1").await;
        let dial = link.dialed().await.random;
        let pending = format!("{PREFIX}pending_backend_dials");
        world.server_metric(&pending, 1.0).await;
        let left = client.leave(how).await;
        assert_eq!(link.payload().await, Some(close_dial(dial)), "{how:?}");
        given_up += 1;
        assert_given_up(&world, given_up).await;
        // A late answer to the cancelled dial.
        conn += 1;
        link.dial_response(dial, conn);
        assert_eq!(link.payload().await, Some(close_request(conn)), "{how:?}");
        drop(left);
    }
}

/// Before the agent answers, the tunnel has no connection id. The server answers DATA and CLOSE_REQ itself, while upstream
/// forwards them.
///
/// Upstream (dials): A dial reaches the agent unchanged, and so does its cancellation. Data and close before the answer
/// stay at the server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_packets_before_the_answer_stay_at_the_server() {
    let world = World::start(&[DIAL_TIMEOUT]).await;
    let (_agent, mut link) = Connection::linked(&world, "silent", "").await;
    let (_connection, mut call) = Connection::proxied(&world).await;
    call.dial(DIAL, "silent.test:1");
    let dial = link.dialed().await.random;
    let closed = |text: &str| Some(close_response(1, text));
    call.close(1);
    assert_eq!(call.payload().await, closed("backend uninitialized"));
    // DATA before the answer also cancels the dial.
    call.data(1, "early");
    assert_eq!(call.payload().await, closed("backend not initialized"));
    assert_eq!(link.payload().await, Some(close_dial(dial)));
}

/// The target neither accepts nor refuses the connection. The agent closes its connecting socket as soon as the client
/// disconnects.
///
/// Upstream (dials): A dial that its client cancels is cancelled at the agent and counted once on both ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_aborts_a_pending_connect_when_the_client_disconnects() {
    let (target, _echo) = targets::local_echo().await;
    for lanes in [&["--lanes-per-link=0"][..], &[]] {
        let (world, agent) =
            World::linked(&[&[DIAL_TIMEOUT], lanes].concat(), &[DIAL_TIMEOUT]).await;
        let hole = targets::silent_host();
        for (number, how) in ALL.into_iter().enumerate() {
            let client = Client::dial(&world, how, &hole.address).await;
            until(&format!("{how:?}: a dial"), || hole.dials() == 1).await;
            let left = client.leave(how).await;
            until(&format!("{how:?}: the end of it"), || hole.dials() == 0).await;
            let given_up = u32::try_from(number + 1).expect("five");
            assert_given_up(&world, given_up).await;
            drop(left);
        }
        world.assert_serves(&target).await;
        // A cancelled dial does not count as a failure.
        let scrapes = [
            world.server().metrics.scrape().text(),
            agent.metrics.scrape().text(),
        ];
        let failures = scrapes.map(|text| sum(&text, "adit_dial_failures_total"));
        assert_eq!(failures, [0.0, 0.0]);
    }
}
