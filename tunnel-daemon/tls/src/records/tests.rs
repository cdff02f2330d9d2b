//! Tests of record streams against plain rustls and against each other: bytes are intact for all sizes, and forged
//! records are refused.

use std::net::Ipv4Addr;
use std::time::Duration;

use adit_core::tls13::EMPTY_RECORDS_MAX;
use adit_relay::KernelTlsError;
use proptest::prelude::*;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

mod differential;

use super::*;
use crate::handshake::{accept_tls, connect_tls};
use crate::reload::Reloadable;
use crate::stream::{ByteStream, PeerAddr};
use crate::tls::{Alpn, ClientTls, ServerTls};
use adit_config::tls_policy::TlsPolicy;
use adit_testkit::certificates::ThrowawayFiles;

const PROTOCOL: &str = "records/1";
const DEADLINE: Duration = Duration::from_secs(10);

/// Both ends of a fresh TLS connection, still with rustls.
async fn connection() -> (ByteStream, ByteStream) {
    let files = ThrowawayFiles::create(&["localhost".to_owned()]).unwrap();
    let server = Reloadable::load(ServerTls {
        cert: files.cert("server"),
        key: files.key("server"),
        client_ca: Some(files.ca_file()),
        client_crl: None,
        client_may_be_anonymous: false,
        policy: TlsPolicy::default(),
        alpn: Alpn::grpc::<&str>(&[]).with_records(PROTOCOL),
    })
    .unwrap();
    let client = Reloadable::load(ClientTls {
        crl: None,
        ca: files.ca_file(),
        identity: Some((files.cert("agent"), files.key("agent"))),
        policy: TlsPolicy::default(),
        alpn: Alpn::grpc::<&str>(&[]).records_beside(PROTOCOL),
    })
    .unwrap();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let peer = PeerAddr::Tcp(address);
    let accept = async {
        let (socket, _peer) = listener.accept().await.unwrap();
        accept_tls(Socket::Tcp(socket), peer, &server, DEADLINE)
            .await
            .unwrap()
    };
    let connect = async {
        let socket = Socket::Tcp(TcpStream::connect(address).await.unwrap());
        let name = ServerName::try_from("localhost").unwrap();
        connect_tls(socket, peer, &client, name, None, DEADLINE)
            .await
            .unwrap()
    };
    let (mut server, mut client) = tokio::join!(accept, connect);
    // A greeting in each direction, as on lanes: after it the client has read the server's tickets.
    server.write_all(b"hello").await.unwrap();
    server.flush().await.unwrap();
    let mut five = [0; 5];
    client.read_exact(&mut five).await.unwrap();
    client.write_all(b"hello").await.unwrap();
    client.flush().await.unwrap();
    server.read_exact(&mut five).await.unwrap();
    (server, client)
}

fn records(stream: ByteStream) -> RecordStream {
    let ByteStream::Tls(tls) = stream else {
        panic!("no TLS")
    };
    tls.into_records().unwrap()
}

async fn ours() -> (RecordStream, RecordStream) {
    let (server, client) = connection().await;
    (records(server), records(client))
}

/// Copies of the library's secrets have types that clear them on drop.
#[tokio::test]
async fn secrets_are_cleared_when_they_are_dropped() {
    fn clears(_secret: &impl zeroize::ZeroizeOnDrop) {}
    let (server, _client) = ours().await;
    clears(&server.tx.secret);
    clears(&server.tx.iv);
    let noted = TrafficSecrets::default();
    rustls::KeyLog::log(&noted, "CLIENT_TRAFFIC_SECRET_0", &[], &[7; 32]);
    clears(noted.client.get().unwrap());
}

async fn read(stream: &mut RecordStream) -> io::Result<Bytes> {
    let next = poll_fn(|cx| stream.poll_read(cx, usize::MAX));
    tokio::time::timeout(DEADLINE, next)
        .await
        .expect("something comes")
}

async fn read_all(stream: &mut RecordStream, count: usize) -> Vec<u8> {
    let mut got = Vec::new();
    while got.len() < count {
        got.extend_from_slice(&read(stream).await.unwrap());
    }
    got
}

async fn write(stream: &mut RecordStream, pieces: impl IntoIterator<Item = Vec<u8>>) {
    let mut out = Outbox::default();
    for piece in pieces {
        out.push(piece.into());
    }
    poll_fn(|cx| stream.poll_flush(cx, &mut out)).await.unwrap();
}

fn pattern(length: usize) -> Vec<u8> {
    (0..=250).cycle().take(length).collect()
}

#[tokio::test]
async fn records_interoperate_with_a_rustls_peer() {
    let (mut server, client) = connection().await;
    let mut client = records(client);
    for length in [1, 100, 16_384, 16_385, 70_000, 1_000_000] {
        let sent = pattern(length);
        let both = async {
            let mut got = vec![0; length];
            tokio::join!(write(&mut client, [sent.clone()]), async {
                server.read_exact(&mut got).await.unwrap();
            });
            assert!(got == sent, "{length} bytes to rustls");
            let back = async {
                server.write_all(&sent).await.unwrap();
                server.flush().await.unwrap();
            };
            let ((), got) = tokio::join!(back, read_all(&mut client, length));
            assert!(got == sent, "{length} bytes from rustls");
        };
        tokio::time::timeout(DEADLINE, both).await.unwrap();
    }
    server.shutdown().await.unwrap();
    assert_eq!(read(&mut client).await.unwrap(), Bytes::new());
    assert_eq!(read(&mut client).await.unwrap(), Bytes::new());
}

/// Payload and record overhead both count.
#[tokio::test]
async fn payload_and_record_overhead_are_counted() {
    let (mut server, mut client) = ours().await;
    let _greeting = server.take_read_bytes();
    write(&mut client, [pattern(50_000)]).await;
    assert_eq!(read_all(&mut server, 50_000).await, pattern(50_000));
    let counts = [server.take_read_bytes(), server.take_read_bytes()];
    assert_eq!(counts, [50_000 + 4 * RECORD_OVERHEAD, 0]);
}

/// The close_notify of a session may share a read with the plaintext after it.
#[tokio::test]
async fn plaintext_begins_right_after_close_notify() {
    for together in [false, true] {
        let (mut server, client) = ours().await;
        let mut client = if together {
            // Sends close_notify as `into_clear` does, with plaintext in the same packet.
            let mut out = borrow().to_vec();
            let room = &mut out[..RECORD_OVERHEAD + 2];
            let to = server.seal_one(room, ALERT, |plain| {
                plain[..2].copy_from_slice(&[WARNING, CLOSE_NOTIFY]);
                2
            });
            let to = to.unwrap();
            out.truncate(to);
            out.extend_from_slice(b"clear text");
            server.socket.write_all(&out).await.unwrap();
            let client = client.into_clear().await.unwrap();
            assert_eq!(read(&mut server).await.unwrap(), Bytes::new());
            client
        } else {
            let both = tokio::join!(server.into_clear(), client.into_clear());
            let (mut server, client) = (both.0.unwrap(), both.1.unwrap());
            let mut out = Outbox::default();
            out.push(Bytes::from_static(b"clear text"));
            poll_fn(|cx| server.poll_flush(cx, &mut out)).await.unwrap();
            client
        };
        let mut got = Vec::new();
        while got.len() < 10 {
            let next = poll_fn(|cx| client.poll_read(cx, usize::MAX));
            got.extend_from_slice(&next.await.unwrap());
        }
        assert_eq!(got, b"clear text");
    }
}

#[tokio::test]
async fn eof_without_close_notify_is_an_error() {
    let (server, client) = connection().await;
    let mut client = records(client);
    drop(server);
    let error = read(&mut client).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
}

#[tokio::test]
async fn keys_are_renewed_when_due_and_on_a_key_update_request() {
    let (mut server, mut client) = ours().await;
    for round in 0..3 {
        // The keys are almost used up, so their renewal comes between two batches.
        client.tx.records = RECORDS_PER_KEY - 1;
        let before = client.tx.secret.clone();
        for _batch in 0..3 {
            write(&mut client, [pattern(50_000)]).await;
            assert_eq!(read_all(&mut server, 50_000).await, pattern(50_000));
        }
        assert_ne!(client.tx.secret, before, "round {round}");
        assert_eq!(client.tx.secret, server.rx.secret);
    }
    // With rustls as the peer: it requests new keys from this module.
    let (server, client) = connection().await;
    let mut client = records(client);
    let ByteStream::Tls(server) = server else {
        panic!("no TLS")
    };
    let before = client.tx.secret.clone();
    let mut server = server.with_new_keys();
    server.write_all(b"after the update").await.unwrap();
    server.flush().await.unwrap();
    assert_eq!(read(&mut client).await.unwrap(), &b"after the update"[..]);
    write(&mut client, [b"with new keys".to_vec()]).await;
    assert_ne!(client.tx.secret, before);
    let mut got = [0; 13];
    server.read_exact(&mut got).await.unwrap();
    assert_eq!(&got, b"with new keys");
}

#[tokio::test]
async fn tampered_repeated_and_reordered_records_are_refused() {
    // A record that the sender has sealed but not sent.
    fn sealed(stream: &mut RecordStream, payload: &[u8]) -> Vec<u8> {
        let mut out = Outbox::default();
        out.push(Bytes::copy_from_slice(payload));
        let sealed = stream.seal(&mut out).unwrap();
        sealed.buffer[sealed.from..sealed.to].to_vec()
    }
    type Change = fn(&mut Vec<u8>);
    let changes: [(&str, Change); 7] = [
        ("a byte of the payload", |record| record[9] ^= 1),
        ("a byte of the tag", |record| {
            *record.last_mut().unwrap() ^= 1
        }),
        ("the length", |record| record[4] -= 1),
        ("another type", |record| record[0] = ALERT),
        ("another version", |record| record[1] = 2),
        ("twice", |record| record.extend_from_within(..)),
        ("too long", |record| record[3] = 0x42),
    ];
    for (what, change) in changes {
        let (mut server, mut client) = ours().await;
        let mut record = sealed(&mut client, b"a payload of some bytes");
        change(&mut record);
        client.socket.write_all(&record).await.unwrap();
        client.socket.shutdown().await.unwrap();
        let mut read_error = None;
        for _read in 0..2 {
            read_error = read(&mut server).await.err();
            if read_error.is_some() {
                break;
            }
        }
        let error = read_error.unwrap_or_else(|| panic!("{what} got through"));
        assert_ne!(error.kind(), io::ErrorKind::UnexpectedEof, "{what}");
    }
    // Records that arrive in a different order.
    let (mut server, mut client) = ours().await;
    let (first, second) = (sealed(&mut client, b"1"), sealed(&mut client, b"2"));
    client
        .socket
        .write_all(&[second, first].concat())
        .await
        .unwrap();
    assert!(read(&mut server).await.is_err());
}

/// Limit (peers): Consecutive empty TLS records on a lane | 32, then the lane ends
#[tokio::test]
async fn endless_empty_records_are_an_error() {
    let (mut server, mut client) = ours().await;
    let mut room = vec![0; RECORD_OVERHEAD];
    for _record in 0..=EMPTY_RECORDS_MAX {
        let length = client
            .seal_one(&mut room, APPLICATION_DATA, |_plain| 0)
            .unwrap();
        client.socket.write_all(&room[..length]).await.unwrap();
    }
    assert!(read(&mut server).await.is_err());
}

#[tokio::test]
async fn a_connection_that_waits_holds_no_buffer() {
    let (mut server, mut client) = ours().await;
    write(&mut client, [pattern(1_000_000)]).await;
    read_all(&mut server, 1_000_000).await;
    write(&mut client, [pattern(10)]).await;
    read_all(&mut server, 10).await;
    let waits = futures_util::poll!(poll_fn(|cx| server.poll_read(cx, usize::MAX)));
    assert!(waits.is_pending());
    assert_eq!(server.read.capacity(), 0);
    assert!(client.sealed.is_none());
}

/// Chunks of any size that fit are sealed as full records in one buffer, and so leave with one write.
#[tokio::test]
async fn a_batch_is_sealed_into_one_buffer() {
    const BYTES: usize = 100_000;
    let (mut server, _client) = ours().await;
    let mut out = Outbox::default();
    for piece in pattern(BYTES).chunks(10_000) {
        out.push(Bytes::copy_from_slice(piece));
    }
    let sealed = server.seal(&mut out).unwrap();
    assert!(out.is_empty());
    let written = (sealed.from, sealed.to);
    assert_eq!(written, (0, BYTES + 7 * RECORD_OVERHEAD));
}

/// The read returns the first record, and the other records wait in the same block.
#[tokio::test]
async fn one_read_takes_all_available_records() {
    /// Less than any kernel buffers for a reader that has read little so far.
    const BYTES: usize = 2 * PLAIN_BYTES_MAX;
    const SEALED: usize = BYTES + 2 * RECORD_OVERHEAD;
    let waiting = |stream: &RecordStream| {
        let bytes = rustix::io::ioctl_fionread(stream.tcp().unwrap());
        usize::try_from(bytes.unwrap()).unwrap()
    };
    let (mut server, mut client) = ours().await;
    // The second time the reader counts as a bulk reader.
    for _time in 0..2 {
        write(&mut server, [pattern(BYTES)]).await;
        let arrival = async {
            while waiting(&client) < SEALED {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(DEADLINE, arrival).await.unwrap();
        let first = read(&mut client).await.unwrap();
        assert_eq!((first.len(), waiting(&client)), (PLAIN_BYTES_MAX, 0));
        assert_eq!(client.read.bytes().len(), SEALED / 2);
        let second = read(&mut client).await.unwrap();
        assert!([first, second].concat() == pattern(BYTES));
    }
}

#[tokio::test]
async fn sessions_that_cannot_be_taken_over_are_refused() {
    // rustls has decrypted bytes that were not read.
    let (mut server, client) = connection().await;
    let ByteStream::Tls(mut client) = client else {
        panic!("no TLS")
    };
    server.write_all(b"two bytes").await.unwrap();
    server.flush().await.unwrap();
    client.read_exact(&mut [0; 2]).await.unwrap();
    assert!(matches!(
        client.into_records(),
        Err(TakeOverError::Session(_))
    ));
    // The session did not keep its secrets.
    let ByteStream::Tls(mut server) = server else {
        panic!("no TLS")
    };
    server.keep_session();
    assert!(matches!(
        server.into_records(),
        Err(TakeOverError::Session(_))
    ));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn bytes_arrive_as_they_were_sent_whatever_the_sizes(
        there in proptest::collection::vec(0..100_000_usize, 1..12),
        back in proptest::collection::vec(0..40_000_usize, 1..12),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (mut server, mut client) = ours().await;
            let (there_sum, back_sum) = (there.iter().sum(), back.iter().sum());
            let sent = (pattern(there_sum), pattern(back_sum));
            let cut = |sent: &[u8], sizes: &[usize]| {
                let mut at = 0;
                sizes.iter().map(|size| { at += size; sent[at - size..at].to_vec() }).collect::<Vec<_>>()
            };
            let (there, back) = (cut(&sent.0, &there), cut(&sent.1, &back));
            // Each end writes while the other end does not read; loopback buffers hold that much.
            let write_both = async { tokio::join!(write(&mut client, there), read_all(&mut server, there_sum)).1 };
            let got = tokio::time::timeout(DEADLINE, write_both).await.unwrap();
            prop_assert!(got == sent.0);
            let write_both = async { tokio::join!(write(&mut server, back), read_all(&mut client, back_sum)).1 };
            let got = tokio::time::timeout(DEADLINE, write_both).await.unwrap();
            prop_assert!(got == sent.1);
            Ok(())
        })?;
    }
}

/// Records that the kernel may take over must stay in the socket, wherever the reads end.
#[tokio::test]
async fn a_record_read_alone_leaves_the_next_one_in_the_socket() {
    let (mut server, mut client) = ours().await;
    let sent = pattern(3 * 16_384 + 100);
    let both = async {
        tokio::join!(write(&mut server, [sent.clone()]), async {
            let mut got = Vec::new();
            while got.len() < sent.len() {
                let next = poll_fn(|cx| client.poll_read_record(cx)).await.unwrap();
                assert!(client.read.bytes().is_empty());
                got.extend_from_slice(&next);
            }
            assert!(got == sent);
        })
    };
    tokio::time::timeout(DEADLINE, both).await.unwrap();
    // After one read-ahead, the partial record is completed and no more is read.
    write(&mut server, [pattern(40_000)]).await;
    let first = read(&mut client).await.unwrap();
    let mut got = first.len();
    while got < 40_000 {
        let next = poll_fn(|cx| client.poll_read_record(cx));
        got += tokio::time::timeout(DEADLINE, next)
            .await
            .expect("something comes")
            .unwrap()
            .len();
    }
    assert!(client.read.bytes().is_empty());
}

/// A session that the kernel refuses continues unchanged.
#[tokio::test]
async fn a_session_that_is_not_ready_for_the_kernel_goes_on() {
    let (mut server, mut client) = ours().await;
    write(&mut server, [pattern(100), pattern(40_000)]).await;
    let mut got = read(&mut client).await.unwrap().len();
    if client.read.bytes().is_empty() {
        // The rest arrived later: without bytes read ahead the kernel would accept the session.
        client.update_due = true;
    }
    let refused = client.start_kernel_tls().unwrap_err();
    assert!(
        matches!(refused, KernelTlsError::Untouched(_)),
        "{refused:?}"
    );
    while got < 40_100 {
        got += read(&mut client).await.unwrap().len();
    }
    write(&mut client, [pattern(500)]).await;
    assert_eq!(read_all(&mut server, 500).await, pattern(500));
}
