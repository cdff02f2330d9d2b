//! The HTTP-CONNECT frontend, byte by byte.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use crate::support::combo::Combo;
use crate::support::stack::Stack;
use crate::support::wait::secs;

/// Sends bytes to the frontend's socket unchanged.
fn raw(stack: &Stack, request: &str) -> UnixStream {
    let mut stream = UnixStream::connect(stack.socket()).expect("the frontend listens");
    stream
        .set_read_timeout(Some(secs(15)))
        .expect("the socket takes a timeout");
    stream
        .write_all(request.as_bytes())
        .expect("the frontend reads");
    stream
}

/// Asks for a tunnel to an address. `more` follows the Host header.
fn connect(stack: &Stack, target: &str, more: &str) -> UnixStream {
    let request = format!("CONNECT {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n{more}");
    raw(stack, &request)
}

fn read_all(mut stream: UnixStream) -> String {
    let mut answer = String::new();
    stream
        .read_to_string(&mut answer)
        .expect("the answer ends, and is text");
    answer
}

/// Reads exactly `count` bytes.
fn read_some(stream: &mut UnixStream, count: usize) -> String {
    let mut bytes = vec![0; count];
    stream
        .read_exact(&mut bytes)
        .expect("the answer is that long");
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Asserts the status and the end of an answer.
#[track_caller]
fn assert_is(answer: &str, status: &str, end: &str) {
    let start = format!("HTTP/1.1 {status}\r\n");
    assert!(
        answer.starts_with(&start) && answer.ends_with(end),
        "{answer}"
    );
}

const ESTABLISHED: &str = "HTTP/1.1 200 Connection Established\r\n\r\n";

/// Asserts that a dial of this target fails with status 502 and the agent's text, and is counted at both ends.
#[track_caller]
fn is_a_502(combo: Combo, target: &str, text: &str) {
    let stack = Stack::start(combo);
    let report = stack.bad(&format!("dial-fail {target}"));
    assert_eq!(report.number("status"), 502.0);
    assert!(report.text("body").contains(text), "{report:?}");
    stack.await_server_metric("dial_failure_count", &[("reason", "error_response")], 1.0);
    stack.await_agent_metric("endpoint_dial_failure_total", &[("reason", "unknown")], 1.0);
}

/// Upstream (dials): With CONNECT an unknown name gives status 502 with `no such host`.
fn unknown_name_is_a_502_with_the_agents_text(combo: Combo) {
    is_a_502(combo, "no-such-host.invalid:80", "no such host");
}
rows!(unknown_name_is_a_502_with_the_agents_text: connect);

/// Upstream (dials): With CONNECT a closed port gives status 502 with `connection refused` and a complete body.
fn refused_target_is_a_502_with_the_agents_text(combo: Combo) {
    is_a_502(combo, "closed", "connection refused");
}
rows!(refused_target_is_a_502_with_the_agents_text: go_go_connect adit_go_connect go_adit_connect adit_adit_connect
    adit_go034_connect adit_go0303_connect go034_adit_connect);

/// The success line is exact. The Host header does not determine the target.
fn established_line_is_exact_and_host_is_ignored(combo: Combo) {
    let stack = Stack::start(combo);
    let target = stack.targets.address("echo");
    let mut stream = connect(&stack, &target, "User-Agent: test\r\n\r\n");
    assert_eq!(read_some(&mut stream, ESTABLISHED.len()), ESTABLISHED);
    stream.write_all(b"ping").expect("the tunnel takes bytes");
    assert_eq!(read_some(&mut stream, 4), "ping");
}
rows!(established_line_is_exact_and_host_is_ignored: connect);

fn bytes_behind_the_connect_header_reach_the_target(combo: Combo) {
    let stack = Stack::start(combo);
    let target = stack.targets.address("echo");
    let mut stream = connect(&stack, &target, "\r\nearly bird");
    assert_eq!(read_some(&mut stream, ESTABLISHED.len()), ESTABLISHED);
    assert_eq!(read_some(&mut stream, 10), "early bird");
}
rows!(bytes_behind_the_connect_header_reach_the_target: connect);

fn other_methods_get_a_405(combo: Combo) {
    let stack = Stack::start(combo);
    let request = "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    let answer = read_all(raw(&stack, request));
    let end = "this proxy only supports CONNECT passthrough\n";
    assert_is(&answer, "405 Method Not Allowed", end);
}
rows!(other_methods_get_a_405: go_go_connect adit_go_connect);

/// Without an agent the answer is a 500 with an explanation in its body.
fn no_agent_is_a_500(combo: Combo) {
    let stack = Stack::with(combo, 0, &[]);
    let answer = read_all(connect(&stack, "127.0.0.1:80", "\r\n"));
    let end = "\r\n\r\ncurrently no tunnels available: No agent available";
    assert_is(&answer, "500 Internal Server Error", end);
}
rows!(no_agent_is_a_500: go_go_connect adit_go_connect);

/// An error answer of the agent closes the connection.
fn error_answers_close_the_connection(combo: Combo) {
    let stack = Stack::start(combo);
    let target = stack.targets.address("closed");
    let answer = read_all(connect(&stack, &target, "\r\n"));
    assert_is(&answer, "502 Bad Gateway", "");
    let plain = "Content-Type: text/plain; charset=utf-8\r\n";
    for header in ["Connection: close\r\n", plain] {
        assert!(answer.contains(header), "{answer}");
    }
    assert!(!answer.contains("Content-Length"), "{answer}");
}
rows!(error_answers_close_the_connection: connect);

/// Upstream does not guarantee the order, so its own server is no baseline here.
///
/// Upstream (tunnels): The 200 of a CONNECT is complete before the first byte of the target.
fn established_line_comes_before_the_targets_first_byte(combo: Combo) {
    let stack = Stack::start(combo);
    let target = stack.targets.address("banner");
    for _ in 0..100 {
        let mut stream = connect(&stack, &target, "\r\n");
        let expected = format!("{ESTABLISHED}220 ready\r\n");
        assert_eq!(read_some(&mut stream, expected.len()), expected);
    }
}
rows!(established_line_comes_before_the_targets_first_byte: adit_go_connect adit_adit_connect);

/// kube-apiserver requires it: after the header its read buffer must be empty.
///
/// Upstream (tunnels): The 200 of a CONNECT is complete before the first byte of the target.
fn nothing_is_sent_together_with_the_established_line(combo: Combo) {
    let stack = Stack::start(combo);
    stack.good("banner banner times=50");
}
rows!(nothing_is_sent_together_with_the_established_line: adit_go_connect adit_adit_connect);

/// When the client closes, the server closes the target's connection.
fn client_that_closes_frees_the_target(combo: Combo) {
    let stack = Stack::start(combo);
    let target = stack.targets.address("echo");
    let mut stream = connect(&stack, &target, "\r\n");
    read_some(&mut stream, ESTABLISHED.len());
    stack.await_agent_metric("open_endpoint_connections", &[], 1.0);
    drop(stream);
    stack.await_agent_metric("open_endpoint_connections", &[], 0.0);
    stack.await_server_metric("established_connections", &[], 0.0);
}
rows!(client_that_closes_frees_the_target: go_go_connect adit_go_connect go_adit_connect adit_adit_connect
    adit_go034_connect adit_go0303_connect go034_adit_connect go0303_adit_connect);

/// An endless header is refused, and other clients are served.
fn endless_header_is_refused(combo: Combo) {
    let stack = Stack::start(combo);
    let mut stream = raw(&stack, "CONNECT 127.0.0.1:1 HTTP/1.1\r\n");
    let line = format!("X-Filler: {}\r\n", "x".repeat(8 * 1024));
    // Two mebibytes exceed every limit. The server may stop reading earlier.
    for _ in 0..256 {
        if stream.write_all(line.as_bytes()).is_err() {
            break;
        }
    }
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).ok();
    let answer = String::from_utf8_lossy(&answer).into_owned();
    assert!(
        answer.is_empty() || answer.starts_with("HTTP/1.1 431 "),
        "{answer}"
    );
    stack.assert_serves();
}
rows!(endless_header_is_refused: go_go_connect adit_go_connect);
