//! Tests of links on paused time: a server that never answers the call, and a server whose dials exceed the limit of
//! targets.

use std::collections::HashSet;
use std::future::poll_fn;

use adit_core::destination::DestinationList;
use adit_core::ids::{AgentId, DialId};
use adit_core::session::{Isolation, ProcessBudget};
use adit_core::wire::decode::Decoder;
use adit_core::wire::identifiers::Identifiers;
use adit_core::wire::metadata::{Extensions, PeerVersion};
use adit_core::wire::packet::{Packet, Received};
use bytes::{BufMut as _, Bytes, BytesMut};
use futures_util::poll;
use h2::RecvStream;
use tokio::io::duplex;
use tokio::time::{Instant, timeout};

use super::*;
use adit_host::descriptors::Descriptors;
use adit_net::accounts::Accounts;
use adit_net::dial::Dialer;
use adit_net::resolve::{Resolve, SystemResolver};
use adit_net::self_sockets::OwnSockets;
use adit_net::tasks::Tasks;
use adit_telemetry::AgentMetrics;
use adit_tunnel::lane::LaneRoom;

fn identity() -> Identity {
    Identity {
        hello: AgentHello {
            agent: AgentId::new("a"),
            identifiers: Identifiers::default(),
            extensions: Extensions::default(),
            version: PeerVersion::default(),
            peer: None,
            zone: None,
        },
        token: None,
    }
}

#[test]
fn a_token_is_sent_and_never_printed() {
    let who = Identity {
        token: Some(Masked::new("s3cret\n".to_owned())),
        ..identity()
    };
    let call = request("server", &who).unwrap();
    assert_eq!(call.headers()[header::AUTHORIZATION], "Bearer s3cret");
    let printed = format!("{who:?} {call:?}");
    assert!(!printed.contains("s3cret"), "{printed}");
}

/// Limit (times): Response headers of a link | 10 s
#[tokio::test(start_paused = true)]
async fn response_headers_time_out_after_ten_seconds() {
    let (ours, theirs) = duplex(1 << 16);
    let silent = async {
        let mut connection = h2::server::handshake(theirs).await.unwrap();
        let (_request, _respond) = connection.accept().await.unwrap().unwrap();
        // The HTTP/2 connection is served; the call gets no answer.
        while connection.accept().await.is_some() {}
    };
    let identity = identity();
    let started = Instant::now();
    let opening = open(ours, "server", &identity, Duration::from_secs(3600), None);
    let opened = tokio::select! {
        opened = opening => opened,
        () = silent => panic!("the agent hung up"),
    };
    assert!(matches!(opened.err(), Some(ConnectError::Silent)));
    assert_eq!(started.elapsed(), Duration::from_secs(10));
}

/// A dialler of any target.
pub(crate) fn open_dialer(resolver: Arc<dyn Resolve>) -> Dialer {
    let open = Arc::new(DestinationList::open());
    Dialer::accounted(
        resolver,
        Arc::<DestinationList>::clone(&open),
        open,
        Duration::from_secs(5),
        Accounts::off(),
        OwnSockets::off(),
        "",
    )
}

/// The context of an agent with room for this many targets.
pub(crate) fn context(targets: usize) -> LinkContext {
    let resolver = Arc::new(SystemResolver::new().unwrap());
    LinkContext {
        agent: AgentId::new("a"),
        dialer: Arc::new(open_dialer(resolver)),
        isolation: Isolation::default(),
        budget: Arc::new(ProcessBudget::new(1 << 30)),
        warn_on_channel_limit: false,
        metrics: AgentMetrics::new(),
        tasks: Tasks::new(targets),
        dials: Arc::default(),
        lane_room: Arc::new(LaneRoom::new(100, Arc::new(Descriptors::unlimited()))),
        lane_watch: Arc::default(),
        relay: None,
        asker: None,
    }
}

/// Reads until `count` dials are refused, each exactly once.
async fn refusals(mut answers: RecvStream, count: usize) {
    let (mut decoder, mut refused) = (Decoder::default(), HashSet::new());
    while refused.len() < count {
        let bytes = answers.data().await.unwrap().unwrap();
        let window = answers.flow_control();
        window.release_capacity(bytes.len()).unwrap();
        decoder.push(bytes);
        while let Some(received) = decoder.next().unwrap() {
            match received {
                Received::Packet(Packet::DialRsp { dial, error, .. }) => {
                    assert!(error.contains("limit of open targets"), "{error}");
                    assert!(refused.insert(dial.0), "{dial:?} is answered again");
                }
                other => panic!("a refusal, not {other:?}"),
            }
        }
    }
}

/// The server answers and closes before the agent polls the connection.
#[tokio::test]
async fn a_connection_closed_after_its_answer_is_not_polled_again() {
    let (ours, theirs) = duplex(1 << 16);
    let server = async {
        let mut connection = h2::server::handshake(theirs).await.unwrap();
        let (_request, mut respond) = connection.accept().await.unwrap().unwrap();
        let hello = http::Response::builder()
            .header("serverid", "s")
            .header("servercount", "1")
            .body(())
            .unwrap();
        let _send = respond.send_response(hello, false).unwrap();
        let written = poll!(poll_fn(|cx| connection.poll_closed(cx)));
        assert!(written.is_pending(), "{written:?}");
    };
    let (identity, context) = (identity(), context(0));
    let agent = async {
        let opening = open(ours, "server", &identity, Duration::from_secs(3600), None);
        let opened = opening.await.expect("it has answered");
        assert!(opened.connection.is_none(), "it would be polled again");
        opened.start(&context, 0).2.await
    };
    let both = async { tokio::join!(agent, server) };
    let (over, ()) = timeout(Duration::from_secs(30), Box::pin(both))
        .await
        .expect("it ends");
    assert!(matches!(over, LinkExit::Transport(_)), "{over}");
}

/// One poll of the stream yields more dials than a command queue could hold answers for.
///
/// Limit (peers): Tasks of dials and targets in an agent | 200,000, then dials are refused
#[tokio::test]
async fn each_dial_of_a_burst_is_refused_when_there_is_no_room_for_targets() {
    let (ours, theirs) = duplex(1 << 20);
    let server = async {
        // As large as a server's window: h2 takes many small frames in a small window for an attack.
        let mut wide = h2::server::Builder::new();
        wide.initial_window_size(1 << 24)
            .initial_connection_window_size(1 << 24);
        let mut connection = wide.handshake::<_, Bytes>(theirs).await.unwrap();
        let (request, mut respond) = connection.accept().await.unwrap().unwrap();
        let hello = http::Response::builder()
            .header("serverid", "s")
            .header("servercount", "1")
            .body(())
            .unwrap();
        let mut send = respond.send_response(hello, false).unwrap();
        let mut burst = BytesMut::new();
        for dial in 1..=DIALS_MAX {
            burst.put(MessageBuf::packet(Packet::DialReq {
                dial: DialId(i64::try_from(dial).unwrap()),
                protocol: String::from("tcp"),
                address: String::from("127.0.0.1:1"),
                window: 0,
            }));
        }
        send.send_data(burst.freeze(), false).unwrap();
        tokio::select! {
            () = refusals(request.into_body(), DIALS_MAX) => (),
            next = connection.accept() => panic!("the agent hung up: {:?}", next.map(|call| call.err())),
        }
    };
    let (identity, context) = (identity(), context(0));
    let agent = async {
        let opening = open(ours, "server", &identity, Duration::from_secs(3600), None);
        let (_link, _silence, running) = opening.await.unwrap().start(&context, 0);
        running.await
    };
    tokio::select! {
        refused = timeout(Duration::from_secs(30), server) => refused.expect("none is lost"),
        over = agent => panic!("{over}"),
    }
}
