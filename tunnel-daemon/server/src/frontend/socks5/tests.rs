//! SOCKS5 clients that are slow, in a hurry, or speak something else; nobody serves their dials.

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, duplex};
use tokio::time::Instant;

use super::*;

/// What a client that sends `sent`, `step` octets a second, is answered until it is closed, and when.
async fn answers(sent: &[u8], step: usize, plan: ConnectPlan) -> (Vec<u8>, Duration) {
    let context = FrontendContext::for_tests();
    let (mut client, server) = duplex(1024);
    let started = Instant::now();
    let serving = establish::run(establishing(server, PeerAddr::Unix, context, plan, None));
    let sending = async {
        for part in sent.chunks(step) {
            client.write_all(part).await.ok();
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        let mut answers = Vec::new();
        client.read_to_end(&mut answers).await.unwrap();
        answers
    };
    let serving = async {
        serving.await;
        started.elapsed()
    };
    let (served, answers) = tokio::join!(serving, sending);
    (answers, served)
}

#[tokio::test(start_paused = true)]
async fn a_request_is_answered_however_it_is_cut() {
    let sent = b"\x05\x01\x00\x05\x01\x00\x03\x06a.test\x00\x50payload";
    // No agent is linked.
    let failed = [&[5, 0][..], &Reply::GeneralFailure.octets()].concat();
    for step in [1, 3, 4, sent.len()] {
        let (answers, _) = answers(sent, step, ConnectPlan::default()).await;
        assert_eq!(answers, failed, "{step} octets a time");
    }
}

#[tokio::test(start_paused = true)]
async fn other_clients_are_answered_in_their_protocol_and_closed() {
    for (sent, answer) in [
        (
            &b"\x04\x01\x00\x50\x0a\x00\x00\x01\x00"[..],
            &[0, 91, 0, 0, 0, 0, 0, 0][..],
        ),
        (b"\x05\x01\x02", &[5, 255]),
        (
            b"\x05\x01\x00\x05\x02\x00\x01",
            &[5, 0, 5, 7, 0, 1, 0, 0, 0, 0, 0, 0],
        ),
        (b"\x16\x03\x01\x02\x00", &[]),
    ] {
        let (answers, _) = answers(sent, 64, ConnectPlan::default()).await;
        assert_eq!(answers, answer, "{sent:?}");
    }
}

/// Limit (times): SOCKS5 greeting and request | 60 s
#[tokio::test(start_paused = true)]
async fn a_request_that_is_never_complete_is_cut_after_sixty_seconds() {
    let sent = [5].repeat(100);
    let (answers, kept) =
        answers(&[&[5, 255], &sent[..]].concat(), 1, ConnectPlan::default()).await;
    assert!(answers.is_empty(), "{answers:?}");
    assert_eq!(kept, Duration::from_secs(60));
    let plan = ConnectPlan {
        head_timeout: Duration::from_secs(7),
        ..ConnectPlan::default()
    };
    let (answers, kept) = self::answers(b"\x05\x01\x00", 64, plan).await;
    assert_eq!((answers, kept), (vec![5, 0], Duration::from_secs(7)));
}

#[test]
fn the_state_of_a_connection_stays_small() {
    let (_client, server) = duplex(64);
    let serving = establish::run(establishing(
        server,
        PeerAddr::Unix,
        FrontendContext::for_tests(),
        ConnectPlan::default(),
        None,
    ));
    let bytes = size_of_val(&serving);
    assert!(bytes <= 56, "{bytes} bytes around a tunnel");
}
