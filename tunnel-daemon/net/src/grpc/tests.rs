//! Tests of HTTP/2 connections over in-memory pipes, mostly on paused time.

use super::*;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};

const WINDOWS: Windows = Windows {
    frame_bytes: SMALL_FRAME_BYTES,
    stream_bytes: 65_535,
    send_buffer_bytes: 65_535,
};

/// A frame that requires no answer.
const WINDOW_UPDATE: &[u8] = b"\0\0\x04\x08\0\0\0\0\0\0\0\0\x01";

/// A connection after the client's preface, and the client's end.
async fn greeted() -> (Box<ServerConnection<DuplexStream>>, DuplexStream) {
    let greeting = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    let (near, mut far) = tokio::io::duplex(1 << 16);
    far.write_all(greeting).await.expect("it is open");
    let connection = accept(&server_builder(WINDOWS), near).await;
    (connection.expect("HTTP/2"), far)
}

/// Limit (times): A new HTTP/2 connection without a preface | closed after 10 s
#[tokio::test(start_paused = true)]
async fn a_client_without_a_preface_is_timed_out() {
    let builder = server_builder(WINDOWS);
    for said in [&b""[..], b"PRI * HTTP/2.0\r\n"] {
        let (near, mut far) = tokio::io::duplex(1024);
        far.write_all(said).await.expect("it is open");
        let greeted = timeout(2 * GREETING_TIMEOUT, accept(&builder, near));
        let error = greeted.await.expect("an end").err();
        assert!(
            matches!(error, Some(ConnectionError::NoGreeting)),
            "{error:?}"
        );
    }
}

/// Limit (times): A silent agent
#[tokio::test(start_paused = true)]
async fn a_silent_watched_peer_is_suspected_until_its_next_frame() {
    const EVERY: Duration = Duration::from_secs(60);
    let (connection, mut far) = greeted().await;
    let told = std::cell::RefCell::new(Vec::new());
    let silence = |quiet: Duration| told.borrow_mut().push((quiet.as_secs(), Instant::now()));
    let never = CancellationToken::new();
    let serving = connection.serve_watched(EVERY, never, silence, |_request, _respond| None);
    let mut serving = pin!(serving);
    let mut said = Instant::now();
    for _twice in 0..2 {
        let going_on = timeout(Duration::from_secs(10), serving.as_mut()).await;
        assert!(going_on.is_err(), "{going_on:?}");
        let told_now = told.take();
        let [(4, suspected), (5, _), ..] = told_now[..] else {
            panic!("its silence is told each second: {told_now:?}");
        };
        let after = suspected - said;
        assert!((4..=5).contains(&after.as_secs()), "{after:?}");
        said = Instant::now();
        far.write_all(WINDOW_UPDATE).await.expect("it is open");
        let heard = timeout(Duration::from_secs(2), serving.as_mut()).await;
        assert!(heard.is_err() && matches!(told.take()[..], [(0, _)]));
    }
    let silent = Instant::now();
    let end = serving.await;
    assert!(matches!(end, Err(ConnectionError::Silent)), "{end:?}");
    assert!(silent.elapsed() <= EVERY + PING_TIMEOUT + ASK_AFTER + ANSWER_WITHIN);
}

/// A Go server ends a connection that sends more than one PING in 30 s.
///
/// Limit (times): A silent server
#[tokio::test(start_paused = true)]
async fn a_go_server_gets_no_ping_for_30_seconds_and_is_suspected_after_31() {
    const EVERY: Duration = Duration::from_secs(30);
    let (near, mut far) = tokio::io::duplex(1 << 16);
    let (_requests, connection) = connect(&client_builder(WINDOWS), near)
        .await
        .expect("it is open");
    let told = std::cell::RefCell::new(Vec::new());
    let start = Instant::now();
    let silence = |quiet: Duration| told.borrow_mut().push((quiet.as_secs(), start.elapsed()));
    let running = connection.run(|| Patience::rarely_asking(EVERY), silence);
    let mut running = pin!(running);
    let pings = |far: &mut DuplexStream| {
        let mut said = Vec::new();
        let cx = &mut Context::from_waker(std::task::Waker::noop());
        let mut block = [0; 1024];
        let mut read = tokio::io::ReadBuf::new(&mut block);
        while Pin::new(&mut *far).poll_read(cx, &mut read).is_ready() && !read.filled().is_empty() {
            said.extend_from_slice(read.filled());
            read.clear();
        }
        said.windows(4)
            .filter(|frame| *frame == [0, 0, 8, 6])
            .count()
    };
    let early = timeout(EVERY - Duration::from_secs(1), running.as_mut()).await;
    assert!(early.is_err() && pings(&mut far) == 0);
    let later = timeout(Duration::from_secs(10), running.as_mut()).await;
    assert!(later.is_err() && pings(&mut far) == 1);
    assert!(matches!(told.take()[..], [(31, _), (32, _), ..]));
    let end = running.await;
    assert!(matches!(end, Err(ConnectionError::Silent)), "{end:?}");
    assert!(start.elapsed() <= EVERY + PING_TIMEOUT + ANSWER_WITHIN);
}

/// This includes acknowledgements that no other frame can share a write with.
///
/// Limit (times): Delay of an HTTP/2 PING or SETTINGS acknowledgement to share a write
#[tokio::test(start_paused = true)]
async fn a_ping_on_an_idle_connection_is_answered() {
    let (connection, mut far) = greeted().await;
    let every = Duration::from_secs(60);
    let serving = connection.serve_watched(
        every,
        CancellationToken::new(),
        |_quiet| (),
        |_request, _respond| None,
    );
    let answered = pinged(&mut far);
    tokio::select! {
        end = serving => panic!("{end:?}"),
        answered = timeout(Duration::from_millis(10), answered) => answered.expect("an answer"),
    }
}

/// Calls that are cancelled at once, with these numbers and minimal headers.
fn cancelled_calls(numbers: std::ops::Range<u32>) -> Vec<u8> {
    let call = |number: u32| {
        let stream = (2 * number + 1).to_be_bytes();
        // HEADERS with POST, "http", "/" and authority "a"; RST_STREAM with CANCEL.
        let headers = [&b"\0\0\x06\x01\x05"[..], &stream, b"\x83\x86\x84\x41\x01a"].concat();
        [&headers[..], b"\0\0\x04\x03\0", &stream, b"\0\0\0\x08"].concat()
    };
    numbers.flat_map(call).collect()
}

/// Sends a PING and reads until its acknowledgement.
async fn pinged(far: &mut DuplexStream) {
    let ping = b"\0\0\x08\x06\0\0\0\0\0a number";
    let answer = b"\0\0\x08\x06\x01\0\0\0\0a number";
    far.write_all(ping).await.expect("it is open");
    let mut said: Vec<u8> = Vec::new();
    while !said.windows(answer.len()).any(|some| some == answer) {
        let read = far.read_buf(&mut said).await;
        assert!(read.is_ok_and(|bytes| bytes > 0), "it is open");
    }
}

/// A burst of more cancelled calls than h2 keeps by default before it ends the connection (1,024).
///
/// Limit (peers): Calls of an agent or peer cancelled before the server accepted them | 4,096, then the connection is read at 1,000 of them
/// per second
#[tokio::test(start_paused = true)]
async fn a_burst_of_cancelled_calls_ends_no_connection_and_is_taken_at_once() {
    const CALLS: u32 = 2000;
    let (connection, mut far) = greeted().await;
    let (mut calls, never) = (0, CancellationToken::new());
    let serving = connection.serve_watched(
        Duration::from_secs(60),
        never,
        |_quiet| (),
        |_request, _respond| {
            calls += 1;
            None
        },
    );
    let start = Instant::now();
    let burst = async {
        far.write_all(&cancelled_calls(0..CALLS))
            .await
            .expect("it is open");
        pinged(&mut far).await;
        start.elapsed()
    };
    tokio::select! {
        end = serving => panic!("{end:?}"),
        taken = burst => assert!(taken < Duration::from_millis(100), "{taken:?}"),
    }
    assert_eq!(calls, CALLS);
}

/// Limit (peers): Calls of an agent or peer cancelled before the server accepted them
#[tokio::test(start_paused = true)]
async fn a_flood_of_cancelled_calls_is_read_at_a_thousand_a_second_and_ends_no_connection() {
    const CALLS: u32 = 30_000;
    let (connection, mut far) = greeted().await;
    let (calls, never) = (std::cell::Cell::new(0), CancellationToken::new());
    let serving = connection.serve_watched(
        Duration::from_secs(60),
        never,
        |_quiet| (),
        |_request, _respond| {
            calls.set(calls.get() + 1);
            None
        },
    );
    let start = Instant::now();
    let flood = async {
        for first in (0..CALLS).step_by(1000) {
            let some = cancelled_calls(first..first + 1000);
            far.write_all(&some).await.expect("it is open");
            // Bytes buffered in the pipe, and bytes of one read.
            let most = 4096 + start.elapsed().as_millis() + 2 * (1 << 16) / 22;
            assert!(
                calls.get() <= most,
                "{} calls after {:?}",
                calls.get(),
                start.elapsed()
            );
        }
        pinged(&mut far).await;
        start.elapsed()
    };
    tokio::select! {
        end = serving => panic!("{end:?}"),
        taken = flood => assert!((15..40).contains(&taken.as_secs()), "{taken:?}"),
    }
    assert_eq!(calls.get(), u128::from(CALLS));
}

#[test]
fn messages_are_percent_encoded_and_read_back() {
    assert_eq!(encode_message("100% ü"), "100%25 %C3%BC");
    let trailers = status(Code::Unavailable, "no agent");
    assert_eq!(trailers.get("grpc-status").unwrap(), "14");
    assert_eq!(trailers.get("grpc-message").unwrap(), "no agent");
}

/// Limit (peers): Calls on one HTTP/2 connection of an agent or peer | 4,096
#[tokio::test(start_paused = true)]
async fn settings_allow_a_peer_4096_calls_on_a_connection() {
    let (connection, mut far) = greeted().await;
    let every = Duration::from_secs(60);
    let serving = connection.serve_watched(
        every,
        CancellationToken::new(),
        |_quiet| (),
        |_request, _respond| None,
    );
    // SETTINGS_MAX_CONCURRENT_STREAMS.
    let setting = b"\0\x03\0\0\x10\0";
    let told = async {
        let mut said: Vec<u8> = Vec::new();
        while !said.windows(setting.len()).any(|some| some == setting) {
            let read = far.read_buf(&mut said).await;
            assert!(read.is_ok_and(|bytes| bytes > 0), "it is open");
        }
    };
    tokio::select! {
        end = serving => panic!("{end:?}"),
        told = timeout(Duration::from_secs(1), told) => told.expect("the setting"),
    }
}

/// Each frame occupies a queue entry that flow control does not count.
///
/// Limit (peers): Small DATA frames queued in one HTTP/2 connection | 65,536, then the connection ends
#[tokio::test(start_paused = true)]
async fn too_many_queued_small_frames_end_the_connection() {
    /// A window that all frames fit into.
    const WINDOW_BYTES: u32 = 1 << 20;
    let windows = Windows {
        stream_bytes: WINDOW_BYTES,
        ..WINDOWS
    };
    let (near, far) = tokio::io::duplex(1 << 20);
    let server = async {
        let connection = accept(&server_builder(windows), near).await;
        let connection = connection.expect("HTTP/2");
        // The bodies of calls are not read.
        let mut unread = Vec::new();
        let never = CancellationToken::new();
        let every = Duration::from_secs(3600);
        connection
            .serve_watched(
                every,
                never,
                |_quiet| (),
                |request, respond| {
                    unread.push((request, respond));
                    None
                },
            )
            .await
    };
    let client = async {
        let mut builder = client::Builder::new();
        builder.max_send_buffer_size(1 << 21);
        let handshake = builder.handshake::<_, bytes::Bytes>(far).await;
        let (mut requests, connection) = handshake.expect("HTTP/2");
        let request = Request::post("http://a/b").body(()).expect("a request");
        let (_response, mut stream) = requests.send_request(request, false).expect("room");
        let mut connection = pin!(connection);
        for frame in 0..2 * DATA_FRAME_BUDGET_BYTES / 256 {
            let sent = stream.send_data(bytes::Bytes::from_static(b"x"), false);
            sent.expect("the connection is open");
            // Lets frames leave before too many are queued.
            if frame % 1024 == 0
                && let Ok(end) = timeout(Duration::from_millis(1), connection.as_mut()).await
            {
                return end;
            }
        }
        timeout(Duration::from_secs(1), connection)
            .await
            .unwrap_or(Ok(()))
    };
    let (_served, end) = futures_util::join!(server, client);
    let reason = end.err().and_then(|error| error.reason());
    assert_eq!(reason, Some(h2::Reason::ENHANCE_YOUR_CALM));
}

/// Limit (sizes): Bytes of an unknown method name that the answer repeats | 64
#[test]
fn the_answer_repeats_only_the_beginning_of_an_unknown_method() {
    assert_eq!(unknown_method(b"/A/B"), "unknown method /A/B");
    let long = unknown_method("%".repeat(4096).as_bytes());
    assert_eq!(long.len(), "unknown method ".len() + EXCERPT_BYTES_MAX);
}
