//! Peers that begin long messages on many streams and never finish them. The server does not buffer those messages.

use bytes::Bytes;

use super::processes::Processes;
use crate::support::process::at_least;
use crate::support::raw::{Call, Connection};
use crate::support::tls;
use crate::support::wait::within;

/// Streams of a client, and links of an agent's certificate.
const STREAMS: usize = 256;
const LINKS: usize = 64;
/// Most links that a server accepts on one connection.
const LINKS_PER_CONNECTION: usize = 8;
/// Bytes sent of each message, whose prefix announces 4 MiB.
const SENT_BYTES: usize = 3 << 20;
/// Far below the 960 MiB that all streams send.
const RESIDENT_MAX: u64 = 64 << 20;

/// Sends the beginning of a message that cannot be DATA.
fn begin(call: &mut Call) {
    static FILLER: [u8; SENT_BYTES] = [b'x'; SENT_BYTES];
    let length = u32::try_from(4 << 20).expect("it fits").to_be_bytes();
    // The first field says DIAL_REQ.
    call.bytes([&[0][..], &length, &[0x08, 0x00]].concat());
    call.bytes(Bytes::from_static(&FILLER));
}

/// Limit (memory): Incomplete gRPC messages
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn incomplete_messages_on_many_streams_take_little_memory() {
    let processes = Processes::start(&[]).await;
    let world = &processes.world;
    let client = Connection::client(world).await;
    let before = processes.server.resident_bytes();
    let mut calls = Vec::new();
    for _stream in 0..STREAMS {
        let mut call = client.proxy().await;
        begin(&mut call);
        calls.push(call);
    }
    let mut connections = Vec::new();
    for number in 0..LINKS {
        if number % LINKS_PER_CONNECTION == 0 {
            let dialed = tls::dial_to(world, b"h2", processes.agents, Some("agent"));
            let stream = within("a TLS handshake", dialed).await.expect("welcome");
            connections.push(Connection::over(stream).await);
        }
        let connection = connections.last().expect("one at least");
        let mut call = connection.link(&format!("agent-{number}"), "").await;
        begin(&mut call);
        calls.push(call);
    }
    let offences = "adit_protocol_offences_total{kind=\"oversize\"}";
    at_least(processes.health, offences, (STREAMS + LINKS) as f64).await;
    // Bytes in flight are bounded by HTTP/2 windows, which other tests cover.
    let more = processes.server.resident_bytes().saturating_sub(before);
    assert!(more < RESIDENT_MAX, "{more} bytes more");
    drop(calls);
}
