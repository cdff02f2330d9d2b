//! Clients of the proxy and targets behind it, in memory: what a target receives, octet by octet, and what a client gets.
#![expect(clippy::disallowed_methods, reason = "tests on runtimes of their own")]

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio_util::sync::CancellationToken;

use std::sync::Arc;

use super::*;

mod world;

use world::{PIPE, World};

/// It gets the whole URL, and our password in place of the client's; targets without one get neither.
#[tokio::test]
async fn a_proxy_behind_this_one_is_asked_for_the_whole_url() {
    let mut world = World::new();
    for (url, line, host) in [
        (
            "http://behind.test/a?b",
            "GET http://behind.test/a?b HTTP/1.1\r\n",
            "behind.test",
        ),
        (
            "http://behind.test:8080",
            "GET http://behind.test:8080/ HTTP/1.1\r\n",
            "behind.test:8080",
        ),
        ("http://other.test/", "GET / HTTP/1.1\r\n", "other.test"),
    ] {
        world
            .say(&format!(
                "GET {url} HTTP/1.1\r\nHost: x\r\nProxy-Authorization: Basic dGhlaXJz\r\n\r\n"
            ))
            .await;
        let (_to, mut target) = world.target().await;
        let request = until(&mut target, "\r\n\r\n").await.to_lowercase();
        assert!(request.starts_with(&line.to_lowercase()), "{request}");
        assert!(request.contains(&format!("host: {host}\r\n")), "{request}");
        let has_ours = request.contains("proxy-authorization: basic b3vycw==");
        assert_eq!(has_ours, host.starts_with("behind"), "{request}");
        assert!(!request.contains("dghlaxjz"), "{request}");
        target
            .write_all(b"HTTP/1.1 204 No Content\r\n\r\n")
            .await
            .unwrap();
        let answer = until(&mut world.client, "\r\n\r\n").await;
        assert!(answer.starts_with("HTTP/1.1 204"), "{answer}");
    }
}

/// All that the client gets until its connection ends.
async fn rest(client: &mut DuplexStream) -> String {
    let mut text = Vec::new();
    within(client.read_to_end(&mut text))
        .await
        .expect("to its end");
    String::from_utf8(text).expect("text")
}

async fn within<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(20), work)
        .await
        .expect("it hangs")
}

/// Reads until the text ends with `end`.
async fn until(io: &mut DuplexStream, end: &str) -> String {
    within(async {
        let mut text = Vec::new();
        while !text.ends_with(end.as_bytes()) {
            let octet = io.read_u8().await;
            text.push(
                octet.unwrap_or_else(|_| {
                    panic!("no {end:?} in {:?}", String::from_utf8_lossy(&text))
                }),
            );
        }
        String::from_utf8(text).expect("text")
    })
    .await
}

/// A request as the target received it, without the name of this proxy.
async fn received(target: &mut DuplexStream, end: &str) -> String {
    let text = until(target, end).await;
    let lines = text.split_inclusive("\r\n");
    lines
        .filter(|line| !line.starts_with("via: 1.1 adit-"))
        .collect()
}

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi";

#[tokio::test]
async fn a_target_gets_one_canonical_request_and_the_client_its_response() {
    let mut world = World::new();
    world
        .say(
            "POST http://web.test/a?b=c HTTP/1.1\r\nHost: other.test\r\nContent-Length: 3\r\nProxy-Connection: keep-alive\r\n\
             Connection: close, X-Mine\r\nX-Mine: 1\r\nX-Kept: 2\r\nProxy-Authorization: Basic c2VjcmV0\r\nTE: trailers\r\n\r\nabc",
        )
        .await;
    let (to, mut target) = world.target().await;
    assert_eq!(to, "web.test:80");
    assert_eq!(
        received(&mut target, "abc").await,
        "POST /a?b=c HTTP/1.1\r\nHost: web.test\r\nContent-Length: 3\r\nX-Kept: 2\r\nConnection: te\r\nTE: trailers\r\n\r\nabc"
    );
    target
        .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nKeep-Alive: timeout=5\r\nConnection: X-Own\r\nX-Own: 1\r\nX-Theirs: 2\r\n\r\nhi")
        .await
        .unwrap();
    let answer = rest(&mut world.client).await;
    assert!(
        answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("\r\n\r\nhi"),
        "{answer}"
    );
    for (header, is_kept) in [
        ("Keep-Alive:", false),
        ("X-Own", false),
        ("X-Theirs: 2", true),
        ("via: 1.1 adit-", true),
    ] {
        assert_eq!(answer.contains(header), is_kept, "{header}: {answer}");
    }
}

/// The classic list: each is refused, or its target gets one request that reads one way only.
#[tokio::test]
async fn requests_that_read_two_ways_are_refused() {
    let post = "POST http://web.test/ HTTP/1.1\r\nHost: web.test\r\n";
    for wrong in [
        format!("{post}Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!"),
        format!("{post}Content-Length: 5, 5\r\n\r\nhello"),
        format!("{post}Content-Length: +5\r\n\r\nhello"),
        format!("{post}Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n"),
        format!("{post}Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n"),
        format!("{post}Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
        format!("{post}Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        format!("{post}Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n"),
        format!("{post}X: a\r\n Transfer-Encoding: chunked\r\n\r\n"),
        format!("{post}X\r\n\r\n"),
        format!("{post}X: a\0b\r\n\r\n"),
        format!("{post}X: a\rContent-Length: 3\r\n\r\n"),
        "GET http://web.test/ HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n".to_owned(),
        "POST http://web.test/ HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".to_owned(),
        "GET / HTTP/1.1\r\nHost: web.test\r\n\r\n".to_owned(),
        "GET https://web.test/ HTTP/1.1\r\nHost: web.test\r\n\r\n".to_owned(),
        "GET http://user:word@web.test/ HTTP/1.1\r\nHost: web.test\r\n\r\n".to_owned(),
        "GET http://web.test:0/ HTTP/1.1\r\nHost: web.test\r\n\r\n".to_owned(),
        "GET http://web.test:99999/ HTTP/1.1\r\nHost: web.test\r\n\r\n".to_owned(),
        "GET http://we%62.test/ HTTP/1.1\r\nHost: web.test\r\n\r\n".to_owned(),
        "CONNECT web.test:1 HTTP/1.1\r\nHost: web.test\r\nContent-Length: 5\r\n\r\nhello".to_owned(),
        "CONNECT web.test:1 HTTP/1.1\r\nHost: web.test\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".to_owned(),
        "CONNECT web.test HTTP/1.1\r\nHost: web.test\r\n\r\n".to_owned(),
        "CONNECT http://web.test:80/ HTTP/1.1\r\nHost: web.test\r\n\r\n".to_owned(),
        "CONNECT user@web.test:80 HTTP/1.1\r\nHost: web.test\r\n\r\n".to_owned(),
    ] {
        let mut world = World::new();
        world.say(&wrong).await;
        let World { dialed, client, .. } = &mut world;
        tokio::select! {
            biased;
            rest = rest(client) => assert!(rest.starts_with("HTTP/1.1 400 "), "{wrong:?}: {rest}"),
            dial = dialed.recv() => panic!("{wrong:?} was dialled: {dial:?}"),
        }
    }
}

/// What this proxy reads otherwise than some others, it writes in the one form.
#[tokio::test]
async fn lenient_forms_reach_the_target_in_canonical_form() {
    for (sent, head, body) in [
        (
            "GET http://web.test:0080/ HTTP/1.1\r\nHost: web.test\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nquery\r\n0\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: web.test\r\nTransfer-Encoding: chunked\r\n\r\n",
            "5\r\nquery\r\n0\r\n\r\n",
        ),
        (
            "POST http://web.test/ HTTP/1.1\r\nHost: web.test\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: web.test\r\nTransfer-Encoding: chunked\r\n\r\n",
            "0\r\n\r\n",
        ),
        (
            "GET http://web.test/ HTTP/1.1\nHost: evil.test\nX: 1\n\n",
            "GET / HTTP/1.1\r\nHost: web.test\r\nX: 1\r\n\r\n",
            "",
        ),
        (
            "POST http://web.test/ HTTP/1.1\r\nHost: web.test\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
            "POST / HTTP/1.1\r\nHost: web.test\r\nContent-Length: 5\r\n\r\n",
            "hello",
        ),
        (
            "POST http://web.test:8080/ HTTP/1.1\r\nHost: web.test\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: web.test:8080\r\nTransfer-Encoding: chunked\r\n\r\n",
            "5\r\nhello\r\n0\r\n\r\n",
        ),
    ] {
        let mut world = World::new();
        world.say(sent).await;
        let (_to, mut target) = world.target().await;
        // With the end of the head: the name of this proxy may end like a chunk.
        let end = format!("\r\n\r\n{body}");
        assert_eq!(
            received(&mut target, &end).await,
            format!("{head}{body}"),
            "{sent:?}"
        );
        target.write_all(OK.as_bytes()).await.unwrap();
        let answer = until(&mut world.client, "hi").await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{sent:?}: {answer}");
    }
}

/// Two parsers that end a chunk at different octets would see two requests.
#[tokio::test]
async fn chunks_with_odd_framing_reach_no_target_as_a_whole() {
    for chunks in [
        "5;x=\"\r\n\"\r\nhello\r\n0\r\n\r\n",
        "5\nhello\n0\n\n",
        "0x5\r\nhello\r\n0\r\n\r\n",
        "+5\r\nhello\r\n0\r\n\r\n",
        "5\r\nhelloX0\r\n\r\n",
    ] {
        let mut world = World::new();
        let head = "POST http://web.test/ HTTP/1.1\r\nHost: web.test\r\nTransfer-Encoding: chunked\r\n\r\n";
        world.say(&format!("{head}{chunks}")).await;
        let (_to, mut target) = world.target().await;
        let mut text = Vec::new();
        let _broken = within(target.read_to_end(&mut text)).await;
        let text = String::from_utf8(text).expect("text");
        assert!(!text.ends_with("\r\n0\r\n\r\n"), "{chunks:?}: {text}");
        let answer = rest(&mut world.client).await;
        assert!(
            answer.is_empty()
                || answer.starts_with("HTTP/1.1 502 ")
                || answer.starts_with("HTTP/1.1 400 "),
            "{chunks:?}: {answer}"
        );
    }
}

#[tokio::test]
async fn a_target_that_speaks_first_is_no_response() {
    let mut world = World::new();
    world
        .say("POST http://web.test/ HTTP/1.1\r\nHost: web.test\r\nContent-Length: 5\r\n\r\n")
        .await;
    let (_to, mut target) = world.target().await;
    target.write_all(OK.as_bytes()).await.unwrap();
    drop(target);
    let answer = rest(&mut world.client).await;
    assert!(answer.starts_with("HTTP/1.1 "), "{answer}");
}

#[tokio::test]
async fn one_connection_serves_several_targets_and_keeps_theirs() {
    let mut world = World::new();
    let mut targets = Vec::new();
    for (at, host) in ["a.test", "b.test", "a.test", "b.test"]
        .into_iter()
        .enumerate()
    {
        world
            .say(&format!(
                "GET http://{host}/{at} HTTP/1.1\r\nHost: {host}\r\n\r\n"
            ))
            .await;
        if at < 2 {
            targets.push(world.target().await);
        }
        let (to, target) = &mut targets[at % 2];
        assert_eq!(*to, format!("{host}:80"));
        let head = received(target, "\r\n\r\n").await;
        assert!(
            head.starts_with(&format!("GET /{at} HTTP/1.1\r\nHost: {host}\r\n")),
            "{head}"
        );
        target.write_all(OK.as_bytes()).await.unwrap();
        until(&mut world.client, "\r\n\r\nhi").await;
    }
    assert!(world.dialed.try_recv().is_err(), "a third connection");
}

/// A target may close a connection that waits, at any time; the next request gets a new one.
#[tokio::test]
async fn a_connection_that_has_ended_while_waiting_is_replaced() {
    let mut world = World::new();
    for _ in 0..2 {
        let mut target = world.get().await;
        target.write_all(OK.as_bytes()).await.unwrap();
        until(&mut world.client, "\r\n\r\nhi").await;
    }
}

#[tokio::test]
async fn connect_hands_over_the_connection_and_early_bytes() {
    let mut world = World::new();
    world
        .say("CONNECT [fd00::1]:443 HTTP/1.1\r\nHost: x\r\n\r\nearly")
        .await;
    let (to, mut target) = world.target().await;
    assert_eq!(to, "[fd00::1]:443");
    let head = until(&mut world.client, "\r\n\r\n").await;
    assert!(
        head.starts_with("HTTP/1.1 200 OK\r\n") && !head.contains("ontent-"),
        "{head}"
    );
    let mut early = String::new();
    within(target.read_to_string(&mut early)).await.unwrap();
    assert_eq!(early, "early");
    let (_io, bytes) = within(world.served).await.unwrap().expect("a tunnel");
    assert_eq!(&bytes[..], b"early");
}

#[tokio::test]
async fn an_upgrade_carries_bytes_both_ways() {
    let mut world = World::new();
    world
        .say("GET http://ws.test/ HTTP/1.1\r\nHost: ws.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        .await;
    let (_to, mut target) = world.target().await;
    let head = received(&mut target, "\r\n\r\n").await;
    assert!(
        head.contains("onnection: upgrade\r\n") && head.contains("pgrade: websocket\r\n"),
        "{head}"
    );
    target
        .write_all(b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\nfrom")
        .await
        .unwrap();
    let head = until(&mut world.client, "\r\n\r\n").await;
    assert!(
        head.starts_with("HTTP/1.1 101 ") && head.contains("pgrade: websocket\r\n"),
        "{head}"
    );
    until(&mut world.client, "from").await;
    world.say("to").await;
    until(&mut target, "to").await;
}

/// HTTP/2 in clear text would carry requests past this proxy.
#[tokio::test]
async fn an_upgrade_to_http_2_is_not_passed_on() {
    let mut world = World::new();
    world
        .say("GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n\r\n")
        .await;
    let (_to, mut target) = world.target().await;
    let head = received(&mut target, "\r\n\r\n").await;
    assert_eq!(head, "GET / HTTP/1.1\r\nHost: a.test\r\n\r\n");
    target
        .write_all(
            b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
        )
        .await
        .unwrap();
    let head = until(&mut world.client, "\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 502 "), "{head}");
}

#[tokio::test]
async fn failures_name_their_cause_in_header_and_body() {
    let mut world = World::new();
    world
        .say("GET http://away.test/ HTTP/1.1\r\nHost: away.test\r\n\r\n")
        .await;
    let head = until(&mut world.client, "connection refused\n").await;
    assert!(head.starts_with("HTTP/1.1 502 "), "{head}");
    assert!(
        head.contains("proxy-status: adit; error=connection_refused\r\n"),
        "{head}"
    );
    // The connection goes on.
    world
        .say("CONNECT away.test:1 HTTP/1.1\r\nHost: away.test\r\n\r\n")
        .await;
    until(&mut world.client, "connection refused\n").await;
    // A target that breaks off before its response.
    world
        .say("GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n")
        .await;
    drop(world.target().await);
    let head = until(&mut world.client, "\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 502 "), "{head}");
    assert!(head.contains("error=http_response_incomplete"), "{head}");
}

/// A response that breaks off must not look complete.
#[tokio::test]
async fn a_response_that_breaks_off_breaks_the_clients_connection() {
    let mut world = World::new();
    let mut target = world.get().await;
    target
        .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
        .await
        .unwrap();
    drop(target);
    let answer = rest(&mut world.client).await;
    assert!(answer.ends_with("\r\n\r\nhalf"), "{answer}");
}

#[tokio::test]
async fn a_request_that_comes_again_is_refused() {
    let leaving = CancellationToken::new();
    let proxy = Arc::new(Proxy::new(64 * 1024, leaving.clone()));
    let mut first = World::with(Arc::clone(&proxy), leaving.clone(), PIPE);
    first
        .say("GET http://loop.test/ HTTP/1.1\r\nHost: loop.test\r\n\r\n")
        .await;
    let (_to, mut target) = first.target().await;
    let head = until(&mut target, "\r\n\r\n").await;
    let via = head
        .lines()
        .find(|line| line.starts_with("via: "))
        .expect("a Via");
    let mut second = World::with(proxy, leaving, PIPE);
    second
        .say(&format!(
            "GET http://loop.test/ HTTP/1.1\r\nHost: loop.test\r\n{via}\r\n\r\n"
        ))
        .await;
    let answer = until(&mut second.client, "leads back here\n").await;
    assert!(
        answer.starts_with("HTTP/1.1 502 ") && answer.contains("proxy_loop_detected"),
        "{answer}"
    );
}

/// The body waits for the target's consent, and is not asked for if the target refuses.
#[tokio::test]
async fn a_body_with_expect_is_sent_when_the_target_wants_it() {
    let ask = "PUT http://a.test/ HTTP/1.1\r\nHost: a.test\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n";
    let mut world = World::new();
    world.say(ask).await;
    let (_to, mut target) = world.target().await;
    let head = received(&mut target, "\r\n\r\n").await;
    assert!(head.contains("Expect: 100-continue\r\n"), "{head}");
    target
        .write_all(b"HTTP/1.1 100 Continue\r\n\r\n")
        .await
        .unwrap();
    until(&mut world.client, "HTTP/1.1 100 Continue\r\n\r\n").await;
    world.say("body").await;
    until(&mut target, "body").await;
    target.write_all(OK.as_bytes()).await.unwrap();
    until(&mut world.client, "\r\n\r\nhi").await;

    let mut world = World::new();
    world.say(ask).await;
    let (_to, mut target) = world.target().await;
    received(&mut target, "\r\n\r\n").await;
    target
        .write_all(b"HTTP/1.1 417 Expectation Failed\r\nContent-Length: 0\r\n\r\n")
        .await
        .unwrap();
    let answer = rest(&mut world.client).await;
    assert!(
        answer.starts_with("HTTP/1.1 417 ") && !answer.contains("100 Continue"),
        "{answer}"
    );
}

#[tokio::test]
async fn trailers_pass_both_ways() {
    let mut world = World::new();
    world
        .say("POST http://a.test/ HTTP/1.1\r\nHost: a.test\r\nTE: trailers\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n1\r\na\r\n0\r\nX-Sum: 1\r\n\r\n")
        .await;
    let (_to, mut target) = world.target().await;
    let text = until(&mut target, "\r\n\r\n1\r\na\r\n0\r\nx-sum: 1\r\n\r\n").await;
    assert!(text.contains("Trailer: X-Sum\r\n"), "{text}");
    target
        .write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-End\r\n\r\n1\r\nb\r\n0\r\nX-End: 2\r\n\r\n")
        .await
        .unwrap();
    until(&mut world.client, "1\r\nb\r\n0\r\nx-end: 2\r\n\r\n").await;
}

#[tokio::test]
async fn a_connection_that_waits_ends_when_the_process_leaves() {
    let mut world = World::new();
    let mut target = world.get().await;
    target.write_all(OK.as_bytes()).await.unwrap();
    until(&mut world.client, "\r\n\r\nhi").await;
    world.leaving.cancel();
    within(world.served).await.unwrap();
    let mut rest = Vec::new();
    within(target.read_to_end(&mut rest)).await.unwrap();
    within(world.client.read_to_end(&mut rest)).await.unwrap();
    assert!(rest.is_empty());
}

/// A response that its reader could end elsewhere than this proxy does.
#[tokio::test]
async fn responses_that_read_two_ways_are_not_passed_on() {
    for (headers, is_passed) in [
        (
            "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n6\r\nabcdef\r\n0\r\n\r\n",
            true,
        ),
        (
            "Transfer-Encoding: gzip, chunked\r\n\r\n6\r\nabcdef\r\n0\r\n\r\n",
            false,
        ),
        ("Transfer-Encoding: gzip\r\n\r\nabcdef", false),
        ("Content-Length: 5, 5\r\n\r\nabcde", false),
        (
            "Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
            false,
        ),
        ("Content-Length: x\r\n\r\nabcdef", false),
    ] {
        let mut world = World::new();
        let mut target = world.get().await;
        let answer = format!("HTTP/1.1 200 OK\r\n{headers}");
        target.write_all(answer.as_bytes()).await.unwrap();
        drop(target);
        let head = until(&mut world.client, "\r\n\r\n").await;
        if !is_passed {
            assert!(head.starts_with("HTTP/1.1 502 "), "{headers:?}: {head}");
            continue;
        }
        assert!(!head.to_lowercase().contains("content-length"), "{head}");
        until(&mut world.client, "6\r\nabcdef\r\n0\r\n\r\n").await;
    }
}

/// Its next request would be written in that version, which has no chunked body.
#[tokio::test]
async fn a_target_of_http_1_0_gets_a_connection_for_each_request() {
    let mut world = World::new();
    for _ in 0..2 {
        let mut target = world.get().await;
        let answer = "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nhi";
        target.write_all(answer.as_bytes()).await.unwrap();
        until(&mut world.client, "\r\n\r\nhi").await;
    }
}

#[tokio::test]
async fn trailers_for_a_proxy_or_a_connection_do_not_pass() {
    let mut world = World::new();
    world
        .say("POST http://a.test/ HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\nTrailer: Proxy-Authorization, X-Sum\r\n\r\n1\r\na\r\n0\r\nProxy-Authorization: Basic c2VjcmV0\r\nX-Sum: 1\r\n\r\n")
        .await;
    let (_to, mut target) = world.target().await;
    let text = until(&mut target, "x-sum: 1\r\n\r\n").await;
    assert!(!text.contains("c2VjcmV0"), "{text}");
}

#[tokio::test]
async fn a_client_that_leaves_takes_its_request_along() {
    let mut world = World::new();
    let mut target = world.get().await;
    let World { client, served, .. } = world;
    drop(client);
    within(served).await.unwrap();
    let mut rest = Vec::new();
    within(target.read_to_end(&mut rest)).await.unwrap();
    assert!(rest.is_empty());
}

#[tokio::test]
async fn options_end_at_the_last_proxy_and_trace_at_the_first() {
    let ask = |method: &str, left: &str| {
        format!("{method} http://a.test/ HTTP/1.1\r\nHost: a.test\r\nMax-Forwards: {left}\r\n\r\n")
    };
    let mut world = World::new();
    world.say(&ask("OPTIONS", "2")).await;
    let (_to, mut target) = world.target().await;
    let head = received(&mut target, "\r\n\r\n").await;
    assert!(head.contains("Max-Forwards: 1\r\n"), "{head}");
    for (request, status) in [
        (ask("OPTIONS", "0"), 200),
        (ask("OPTIONS", "x"), 400),
        (ask("TRACE", "5"), 405),
    ] {
        let mut world = World::new();
        world.say(&request).await;
        let head = until(&mut world.client, "\r\n\r\n").await;
        assert!(
            head.starts_with(&format!("HTTP/1.1 {status} ")),
            "{request}: {head}"
        );
        assert!(world.dialed.try_recv().is_err(), "{request} was dialled");
    }
}

/// Limit (sizes): Request head of an `http-proxy` client | 16 KiB, then status 431
#[tokio::test]
async fn a_head_of_more_than_16_kibibytes_is_refused() {
    for (bytes, is_refused) in [(15 * 1024, false), (16 * 1024, true)] {
        let mut world = World::new();
        let filler = "x".repeat(bytes);
        world
            .say(&format!(
                "GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\nX: {filler}\r\n\r\n"
            ))
            .await;
        if is_refused {
            let answer = rest(&mut world.client).await;
            assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
        } else {
            world.target().await;
        }
    }
}

/// The client is slower than the proxy, which holds most of an answer when it is done with the connection.
#[tokio::test]
async fn answers_are_complete_when_garbage_follows_a_request() {
    let leaving = CancellationToken::new();
    let proxy = Arc::new(Proxy::new(64 * 1024, leaving.clone()));
    let mut world = World::with(proxy, leaving, 16);
    let World { client, dialed, .. } = &mut world;
    let (mut reader, mut writer) = tokio::io::split(client);
    let asks = writer.write_all(b"GET http://a.test/ HTTP/1.1\r\nHost: a\r\n\r\n\0garbage\r\n\r\n");
    let answers = async {
        let (_to, mut target) = dialed.recv().await.expect("a dial");
        received(&mut target, "\r\n\r\n").await;
        target.write_all(OK.as_bytes()).await.unwrap();
    };
    let mut told = String::new();
    let reads = reader.read_to_string(&mut told);
    let (asked, (), read) = within(async { tokio::join!(asks, answers, reads) }).await;
    asked.expect("it is taken");
    read.expect("an orderly end");
    let (_response, refusal) = told.split_once("\r\n\r\nhi").expect("a response");
    assert!(refusal.starts_with("HTTP/1.1 400 "), "{told}");
    assert!(refusal.ends_with("\r\n\r\n"), "{told}");
}

/// Limit (times): Request head of an `http-proxy` client, and its pause between two requests | 60 s
#[tokio::test(start_paused = true)]
async fn a_client_that_asks_for_nothing_is_closed_after_sixty_seconds() {
    let started = tokio::time::Instant::now();
    let mut world = World::new();
    world.say("GET http://a.test/ HTTP/1.1\r\n").await;
    let mut text = Vec::new();
    world
        .client
        .read_to_end(&mut text)
        .await
        .expect("to its end");
    let waited = started.elapsed().as_secs();
    assert!((60..62).contains(&waited), "{waited} s");
}

/// Limit (times): Connection to a target that waits for the next request of its `http-proxy` client | 30 s
#[tokio::test(start_paused = true)]
async fn a_connection_waits_thirty_seconds_for_its_next_request() {
    let mut world = World::new();
    let mut target = world.get().await;
    target.write_all(OK.as_bytes()).await.unwrap();
    until(&mut world.client, "\r\n\r\nhi").await;
    let started = tokio::time::Instant::now();
    let mut rest = Vec::new();
    target.read_to_end(&mut rest).await.expect("to its end");
    let waited = started.elapsed().as_secs();
    assert!((25..=40).contains(&waited), "{waited} s");
}

/// Limit (sizes): Connections to targets that wait for one `http-proxy` client | 32; then the one that waits longest ends
#[tokio::test]
async fn of_33_waiting_connections_the_oldest_ends() {
    let mut world = World::new();
    let mut targets = Vec::new();
    for number in 0..33 {
        world
            .say(&format!(
                "GET http://t{number}.test/ HTTP/1.1\r\nHost: t\r\n\r\n"
            ))
            .await;
        let (_to, mut target) = world.target().await;
        received(&mut target, "\r\n\r\n").await;
        target.write_all(OK.as_bytes()).await.unwrap();
        until(&mut world.client, "\r\n\r\nhi").await;
        targets.push(target);
    }
    let mut rest = Vec::new();
    within(targets[0].read_to_end(&mut rest)).await.unwrap();
    world
        .say("GET http://t1.test/ HTTP/1.1\r\nHost: t\r\n\r\n")
        .await;
    received(&mut targets[1], "\r\n\r\n").await;
}
