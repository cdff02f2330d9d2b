//! Tests of CONNECT heads: valid heads, malformed heads, and every response.

use proptest::prelude::*;

use super::*;
use crate::failure::DialFailure;
use crate::grant::TargetDenied;

const KUBE_APISERVER: &[u8] =
    b"CONNECT 10.0.0.7:10250 HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: kube-apiserver/v1.34\r\n\r\n";

fn parse(bytes: &[u8]) -> Progress {
    RequestHead::default().parse(bytes)
}

fn authority(bytes: &[u8]) -> String {
    match parse(bytes) {
        Progress::Connect(connect) => connect.authority,
        other => panic!("{other:?} for {}", String::from_utf8_lossy(bytes)),
    }
}

fn request(target: &str) -> Vec<u8> {
    format!("CONNECT {target} HTTP/1.1\r\n\r\n").into_bytes()
}

/// Asserts that a head is rejected as malformed.
#[track_caller]
fn malformed(bytes: &[u8]) {
    rejected(bytes, Rejection::Malformed);
}

#[track_caller]
fn rejected(bytes: &[u8], why: Rejection) {
    let text = String::from_utf8_lossy(bytes);
    assert_eq!(parse(bytes), Progress::Rejected(why), "{text:?}");
}

#[test]
fn request_target_overrides_the_host_header() {
    let expected = Connect {
        authority: "10.0.0.7:10250".to_owned(),
        user_agent: Some("kube-apiserver/v1.34".to_owned()),
        consumed: KUBE_APISERVER.len(),
    };
    assert_eq!(parse(KUBE_APISERVER), Progress::Connect(expected));
}

#[test]
fn pipelined_bytes_are_left_to_the_tunnel() {
    let mut bytes = KUBE_APISERVER.to_vec();
    bytes.extend_from_slice(b"\x16\x03\x01\0\r\n\r\n");
    let Progress::Connect(connect) = parse(&bytes) else {
        panic!("no request found")
    };
    assert_eq!(&bytes[connect.consumed..], b"\x16\x03\x01\0\r\n\r\n");
}

#[test]
fn the_outcome_is_the_same_for_a_split_at_every_byte() {
    for at in 0..KUBE_APISERVER.len() {
        let mut parser = RequestHead::default();
        let early = parser.parse(&KUBE_APISERVER[..at]);
        assert_eq!(early, Progress::NeedMore, "split at {at}");
        let whole = parser.parse(KUBE_APISERVER);
        assert_eq!(whole, parse(KUBE_APISERVER), "split at {at}");
    }
}

#[test]
fn bare_line_feeds_and_folded_headers_are_tolerated() {
    assert_eq!(authority(b"CONNECT a:1 HTTP/1.1\n\n"), "a:1");
    let folded = b"CONNECT a:1 HTTP/1.1\nHost: b\r\nX: 1\r\n\t2\n\r\n";
    assert_eq!(authority(folded), "a:1");
    assert_eq!(authority(b"CONNECT a:1 HTTP/1.0\r\n\r\n"), "a:1");
}

#[test]
fn destinations_are_handed_on_verbatim() {
    for text in [
        "kubelet.example:10250",
        "[fd00::1]:443",
        "[fd00::1]",
        "host",
        "host:",
        "::1:80",
        "b\u{fc}ro:1",
    ] {
        assert_eq!(authority(&request(text)), text);
    }
}

/// RFC 6874: a request escapes the percent sign of an IPv6 zone; the dialled address has it unescaped.
#[test]
fn the_zone_of_an_ipv6_address_is_handed_on_decoded() {
    for (text, expected) in [
        ("[fe80::1%25eth0]:80", "[fe80::1%eth0]:80"),
        ("[fe80::1%252]:80", "[fe80::1%2]:80"),
        ("[fe80::1%25eth0]", "[fe80::1%eth0]"),
        ("[fe80::1%25a%2db%20c]:1", "[fe80::1%a-b c]:1"),
    ] {
        assert_eq!(authority(&request(text)), expected);
    }
    for text in [
        "[fe80::1%eth0]:80",
        "fe80::1%25eth0",
        "[fe80::1%25a%0ab]:80",
        "[fe80::1%25a%2fb]:80",
        "[fe80::1%25a%2]:80",
        "[fe80::1%25eth0]80",
        "[fe80%2d::1%25eth0]:80",
    ] {
        malformed(&request(text));
    }
}

#[test]
fn targets_that_are_no_authority_are_malformed() {
    for text in [
        "", "/", "a:b", "[::1", "[::1]x", "[::1]80", "a:1/path", "u@a:1", "a?q", "a#f", "%2f:1",
        "a\t:1",
    ] {
        malformed(&request(text));
    }
}

#[test]
fn request_lines_that_are_not_http_are_malformed() {
    let lines: [&[u8]; 12] = [
        b"\r\n",
        b"\n",
        b"CONNECT\r\n",
        b"CONNECT a:1\r\n",
        b"CONNECT  a:1 HTTP/1.1\r\n",
        b"CONNECT a:1  HTTP/1.1\r\n",
        b"CONNECT a:1 b HTTP/1.1\r\n",
        b"CONNECT a:1 HTTP/11\r\n",
        b"CONNECT a:1 http/1.1\r\n",
        b"CONN(CT a:1 HTTP/1.1\r\n",
        b" a:1 HTTP/1.1\r\n",
        b"CONNECT \xff:1 HTTP/1.1\r\n",
    ];
    lines.into_iter().for_each(malformed);
}

#[test]
fn header_lines_that_are_not_http_are_malformed() {
    let lines: [&[u8]; 7] = [
        b" folded: first",
        b"no colon",
        b": no name",
        b"Name : 1",
        b"N\0: 1",
        b"N: \0",
        b"N: \x7f",
    ];
    for line in lines {
        malformed(&[b"CONNECT a:1 HTTP/1.1\r\n", line, b"\r\n\r\n"].concat());
    }
    malformed(b"CONNECT a:1 HTTP/1.1\r\nN: a\rb\r\n\r\n");
}

#[test]
fn a_tls_hello_is_refused_at_once() {
    malformed(&[0x16, 0x03, 0x01]);
}

#[test]
fn other_methods_and_versions_are_answered_once_the_head_is_complete() {
    assert_eq!(parse(b"GET / HTTP/1.1\r\nHost: a\r\n"), Progress::NeedMore);
    for request in [
        "GET / HTTP/1.1\r\n\r\n",
        "connect a:1 HTTP/1.1\r\n\r\n",
        "POST http://a/ HTTP/1.1\n\n",
    ] {
        rejected(request.as_bytes(), Rejection::NotConnect);
    }
    for request in [
        "CONNECT a:1 HTTP/2.0\r\n\r\n",
        "GET / HTTP/0.9\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\n",
    ] {
        rejected(request.as_bytes(), Rejection::VersionUnsupported);
    }
}

/// Limit (sizes): CONNECT head | 1 MiB, then status 431
#[test]
fn the_head_limit_excludes_pipelined_bytes() {
    let head = b"CONNECT a:1 HTTP/1.1\r\n\r\n";
    let with_data = [&head[..], &[0; 1000]].concat();
    let fits = RequestHead::new(head.len()).parse(&with_data);
    assert!(matches!(fits, Progress::Connect(_)));
    let short = head.len() - 1;
    let too_large = RequestHead::new(short).parse(&with_data);
    assert_eq!(too_large, Progress::Rejected(Rejection::TooLarge));
    let part = RequestHead::new(short).parse(&head[..short - 1]);
    assert_eq!(part, Progress::NeedMore);
}

/// Limit (sizes): CONNECT head
#[test]
fn a_head_without_end_is_refused_at_one_mebibyte() {
    let mut bytes = b"CONNECT a:1 HTTP/1.1\r\nX: ".to_vec();
    bytes.resize(HEAD_LEN_MAX, b'x');
    assert_eq!(parse(&bytes[..HEAD_LEN_MAX - 1]), Progress::NeedMore);
    assert_eq!(parse(&bytes), Progress::Rejected(Rejection::TooLarge));
}

#[test]
fn a_user_agent_is_cut_and_the_first_one_counts() {
    let long = "x".repeat(1000);
    let request =
        format!("CONNECT a:1 HTTP/1.1\r\nuser-agent: {long}\r\nUser-Agent: second\r\n\r\n");
    let Progress::Connect(connect) = parse(request.as_bytes()) else {
        panic!("no request found")
    };
    assert_eq!(connect.user_agent.unwrap(), "x".repeat(256));
}

#[test]
fn rejections_state_the_error_and_close() {
    let rows = [
        (
            Rejection::NotConnect,
            "HTTP/1.1 405 Method Not Allowed\r\n",
            "this proxy only supports CONNECT passthrough\n",
        ),
        (
            Rejection::Malformed,
            "HTTP/1.1 400 Bad Request\r\n",
            "400 Bad Request",
        ),
        (
            Rejection::TooLarge,
            "HTTP/1.1 431 ",
            "431 Request Header Fields Too Large",
        ),
        (
            Rejection::VersionUnsupported,
            "HTTP/1.1 505 ",
            "505 HTTP Version Not Supported: unsupported protocol version",
        ),
    ];
    for (rejection, start, body) in rows {
        let response = String::from_utf8(rejection.response().to_vec()).unwrap();
        let (head, found) = response.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with(start), "{response}");
        let plain = "\r\nContent-Type: text/plain; charset=utf-8\r\n";
        assert!(head.contains(plain), "{response}");
        assert!(head.contains("\r\nConnection: close"), "{response}");
        assert_eq!(found, body);
        if let Some((_, len)) = head.split_once("Content-Length: ") {
            assert!(len.starts_with(&body.len().to_string()), "{response}");
        }
    }
}

#[test]
fn failed_dials_get_the_responses_of_upstream() {
    const PLAIN: &str = "Content-Type: text/plain; charset=utf-8\r\n\r\n";
    const CLOSING: &str = "Connection: close\r\nContent-Type: text/plain; charset=utf-8\r\n\r\n";
    let refused = "dial tcp 10.0.0.1:1: connect: connection refused";
    let answers = |failure: DialFailure, status: &str, headers: &str, text: &str| {
        let expected = format!("HTTP/1.1 {status}\r\n{headers}{text}");
        let response = failure_response(&failure).unwrap();
        assert_eq!(response, expected, "{failure:?}");
    };
    let (agent, target) = (
        DialFailure::NoAgent,
        DialFailure::Target(refused.to_owned()),
    );
    let none = "currently no tunnels available: No agent available";
    let untyped = "Content-Type: text/plain\r\n\r\n";
    answers(agent, "500 Internal Server Error", untyped, none);
    answers(target, "502 Bad Gateway", CLOSING, refused);
    let per_agent = DialFailure::TooManyPending { per_agent: true };
    let [bad, slow, busy] = [
        "502 Bad Gateway",
        "504 Gateway Timeout",
        "503 Service Unavailable",
    ];
    for (failure, status, text) in [
        (
            DialFailure::LinkBusy,
            bad,
            "Failed to tunnel dial request: backend link is not accepting dials",
        ),
        (
            DialFailure::LinkLost,
            bad,
            "Backend context error: context canceled",
        ),
        (
            DialFailure::TimedOut,
            slow,
            "Backend dial timeout: timed out waiting for backend dial",
        ),
        (
            DialFailure::SendTimedOut,
            slow,
            "Failed to tunnel dial request: timed out waiting for backend dial",
        ),
        (per_agent, busy, "too many pending dials on this agent"),
        (DialFailure::TooLong, bad, "dial address is too long"),
        (DialFailure::ShuttingDown, busy, "server is shutting down"),
        (
            DialFailure::NoDescriptors,
            busy,
            "server is short of file descriptors",
        ),
    ] {
        answers(failure, status, PLAIN, &format!("{text}\r\n"));
    }
    assert_eq!(failure_response(&DialFailure::Closed), None);
}

#[test]
fn error_text_of_the_agent_sets_the_status() {
    let rows = [
        ("dial tcp 10.0.0.1:1: i/o Timeout", 504),
        ("context deadline exceeded", 504),
        ("timeout: too many open files", 504),
        ("socket: Too many open files", 503),
        ("lookup x: no such host", 502),
        ("", 502),
    ];
    for (text, code) in rows {
        assert_eq!(TargetStatus::of(text).code(), code, "{text}");
    }
}

#[test]
fn established_response_has_no_headers() {
    assert_eq!(ESTABLISHED, b"HTTP/1.1 200 Connection Established\r\n\r\n");
}

proptest! {
    #[test]
    fn well_formed_requests_survive_any_split(
        host in "[a-z0-9.-]{1,30}",
        port in 0..=u16::MAX,
        headers in prop::collection::vec("[A-Za-z-]{1,12}: [ -~\t]{0,40}(\r)?\n", 0..6),
        data in prop::collection::vec(any::<u8>(), 0..40),
    ) {
        let head = format!("CONNECT {host}:{port} HTTP/1.1\r\n{}\r\n", headers.concat());
        let bytes = [head.as_bytes(), &data].concat();
        for at in 0..bytes.len() {
            let mut parser = RequestHead::default();
            let mut progress = parser.parse(&bytes[..at]);
            if at < head.len() {
                prop_assert_eq!(&progress, &Progress::NeedMore);
                progress = parser.parse(&bytes);
            }
            let Progress::Connect(connect) = progress else { return Err(TestCaseError::fail("not found")) };
            prop_assert_eq!(connect.consumed, head.len());
            prop_assert_eq!(connect.authority, format!("{host}:{port}"));
        }
    }

    #[test]
    fn random_bytes_never_panic_and_no_split_changes_the_result(data in prop::collection::vec(any::<u8>(), 0..700)) {
        fuzz_entry(&data);
    }

    #[test]
    fn likely_texts_never_panic_and_no_split_changes_the_result(
        cut in any::<u8>(),
        text in "(CONNECT |GET )?[a:\\[\\]/ ]{0,8}( HTTP/[12].[01])?\r?\n([A:\r\n ]{0,12}\n){0,4}",
    ) {
        fuzz_entry(&[&[cut], text.as_bytes()].concat());
    }
}

#[test]
fn a_failure_is_read_as_it_was_written() {
    let target = "dial tcp 10.0.0.1:80: connect: connection refused";
    let denied = TargetDenied::quoted("not for you");
    for failure in [
        DialFailure::NoAgent,
        DialFailure::Target(target.to_owned()),
        DialFailure::TimedOut,
        DialFailure::SendTimedOut,
        DialFailure::LinkLost,
        DialFailure::LinkBusy,
        DialFailure::TooManyPending { per_agent: false },
        DialFailure::TooManyPending { per_agent: true },
        DialFailure::TooLong,
        DialFailure::Denied(Box::new(denied)),
        DialFailure::ShuttingDown,
        DialFailure::NoMemory,
        DialFailure::NoDescriptors,
    ] {
        let response = failure_response(&failure).unwrap();
        let text = String::from_utf8(response.to_vec()).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        assert_eq!(failure_of(status, body), failure, "{text}");
    }
}
