//! Clients that half-close before the answer to their dial still get that answer. Only a close or reset of the connection
//! cancels the dial. Upstream reads nothing from a CONNECT client before the answer.

use adit_core::wire::packets::packet::Payload;
use adit_net::socket::set_reset_on_close;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::support::clients::Kind;
use crate::support::connect;
use crate::support::raw::{Call, Connection, close_dial, close_request};
use crate::support::targets::{self, Sum, pattern};
use crate::support::wait::within;
use crate::support::world::World;

/// Exceeds the limit of every test step, so no dial here ends by timeout.
const DIAL_TIMEOUT: &str = "--dial-timeout=60s";
const TARGET: &str = "silent.test:1";
const CONN: i64 = 7;

/// Flags of the server and of the agent for each path of tunnels: link, lanes, raw lanes.
const CARRIERS: [[&[&str]; 2]; 3] = [
    [&["--lanes-per-link=0"], &[]],
    [&[], &[]],
    [
        &["--lane-security=plaintext"],
        &["--lane-security=plaintext"],
    ],
];

/// The target hashes its input and answers only after FIN.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_head_with_data_and_a_half_close_is_answered_and_the_target_gets_both() {
    const CLIENTS: usize = 10;
    let (port, _target, mut seen) = targets::summing().await;
    let target = format!("127.0.0.1:{port}");
    for kind in Kind::ALL {
        for [flags, of_agent] in CARRIERS {
            let (world, _agent) = World::linked(&[kind.flags(), flags].concat(), of_agent).await;
            let mut clients = JoinSet::new();
            for number in 0..CLIENTS {
                let mut stream = kind.connect_first(&world).await;
                let bytes = pattern(number as u64, 1000 * number);
                let expected = Sum::of(&bytes);
                let request = [connect::head(&target), bytes].concat();
                clients.spawn(async move {
                    stream.write_all(&request).await.expect("taken");
                    stream.shutdown().await.expect("a half-close");
                    let mut answer = String::new();
                    stream
                        .read_to_string(&mut answer)
                        .await
                        .expect("a clean end");
                    let whole = format!("{}{}\n", connect::ESTABLISHED, expected.hash);
                    assert_eq!(answer, whole, "client {number}: {kind:?} {flags:?}");
                });
            }
            within("all answers", clients.join_all()).await;
            for _client in 0..CLIENTS {
                assert!(seen.recv().await.is_some_and(|sum| sum.clean));
            }
        }
    }
}

/// A Go agent's tunnel has no half-close, so CLOSE_REQ follows the data, as upstream sends it.
///
/// Upstream (dials): The dial of a client that half-closed goes on until the client is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_dial_of_a_half_closed_client_continues_until_it_disconnects() {
    let world = World::start(&[Kind::Tcp.flags(), &[DIAL_TIMEOUT]].concat()).await;
    let (_connection, mut link) = Connection::linked(&world, "silent", "").await;
    let request = [connect::head(TARGET), b"early".to_vec()].concat();
    let mut stream = world.client().await;
    stream.write_all(&request).await.expect("taken");
    stream.shutdown().await.expect("a half-close");
    link.answer(CONN).await;
    match link.payload().await {
        Some(Payload::Data(data)) => assert_eq!(data.data, "early"),
        other => panic!("no data but {other:?}"),
    }
    assert_eq!(link.payload().await, Some(close_request(CONN)));
    let head = connect::read_head(&mut stream).await;
    assert_eq!(head, connect::ESTABLISHED);

    let mut unix = world.client().await;
    unix.write_all(&request).await.expect("taken");
    unix.shutdown().await.expect("a half-close");
    let dial = link.dialed().await.random;
    drop(unix);
    assert_called_off(&mut link, dial, "a closed unix socket").await;

    let mut tcp = tcp_client(&world).await;
    tcp.write_all(&request).await.expect("taken");
    tcp.shutdown().await.expect("a half-close");
    let dial = link.dialed().await.random;
    break_off(tcp);
    assert_called_off(&mut link, dial, "a reset").await;
}

/// More bytes precede the client's EOF than the server reads before the answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_disconnects_behind_unread_bytes_cancels_its_dial() {
    const MUCH: usize = 100 * 1024;
    let world = World::start(&[Kind::Tcp.flags(), &[DIAL_TIMEOUT]].concat()).await;
    let (_connection, mut link) = Connection::linked(&world, "silent", "").await;
    let request = [connect::head(TARGET), pattern(0, MUCH)].concat();
    let mut unix = world.client().await;
    unix.write_all(&request).await.expect("taken");
    let dial = link.dialed().await.random;
    drop(unix);
    assert_called_off(&mut link, dial, "a closed unix socket").await;

    let mut tcp = tcp_client(&world).await;
    tcp.write_all(&request).await.expect("taken");
    let dial = link.dialed().await.random;
    break_off(tcp);
    assert_called_off(&mut link, dial, "a reset").await;
}

/// A client of the TCP frontend.
async fn tcp_client(world: &World) -> TcpStream {
    let stream = TcpStream::connect(world.server().frontends[0]).await;
    stream.expect("welcome")
}

/// Closes with a reset.
fn break_off(socket: TcpStream) {
    set_reset_on_close(&socket).expect("an option");
}

async fn assert_called_off(link: &mut Call, dial: i64, what: &str) {
    assert_eq!(link.payload().await, Some(close_dial(dial)), "{what}");
}
