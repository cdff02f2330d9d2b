//! Connections of clients over pipes: the client of the `h2` crate, and raw frames where it would not send them.

use std::cell::Cell;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use adit_core::ids::ConnId;
use adit_core::session::{BOUNDED_CALL_WINDOW_BYTES, MemoryBounds};
use adit_core::wire::packet::Packet;
use http::Request;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::task::JoinSet;

use super::*;

const LIMITS: ServerLimits = ServerLimits {
    calls_max: 100,
    window_bytes: 256 * 1024,
    output_bytes: 128 * 1024,
};
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
const EVERY: Duration = Duration::from_secs(60);

fn budget() -> Arc<ProcessBudget> {
    Arc::new(ProcessBudget::new(64 << 20))
}

/// A connection whose client has greeted.
async fn greeted() -> (Box<CallConnection<DuplexStream>>, DuplexStream) {
    let (near, mut far) = tokio::io::duplex(1 << 16);
    far.write_all(PREFACE).await.expect("it is open");
    let connection = accept(near, LIMITS, &budget(), None).await;
    (connection.expect("HTTP/2"), far)
}

/// Sends back what comes as messages of packets, in pieces as they come.
async fn echo(mut call: Call) {
    let mut is_sent = true;
    let done = poll_fn(|cx| {
        loop {
            if !is_sent {
                match call.poll_drained(cx) {
                    Poll::Ready(Ok(())) => is_sent = true,
                    Poll::Ready(Err(_gone)) => return Poll::Ready(false),
                    Poll::Pending => return Poll::Pending,
                }
            }
            match ready!(call.poll_data(cx)) {
                Some(Ok(bytes)) => {
                    call.release(bytes.len());
                    let conn = ConnId(1);
                    is_sent = call.send(MessageBuf::packet(Packet::Data { conn, bytes }));
                }
                Some(Err(_gone)) => return Poll::Ready(false),
                None => return Poll::Ready(true),
            }
        }
    });
    if done.await {
        call.finish(Code::Ok, "");
    }
}

/// The payloads of packets, as they lie in messages.
fn payloads(stream: Vec<u8>) -> Vec<u8> {
    let mut decoder = adit_core::wire::decode::Decoder::default();
    decoder.push(stream.into());
    let mut all = Vec::new();
    while let Ok(Some(received)) = decoder.next() {
        if let adit_core::wire::packet::Received::Packet(Packet::Data { bytes, .. }) = received {
            all.extend_from_slice(&bytes);
        }
    }
    all
}

/// Two implementations of HTTP/2 agree: many calls on one connection, each with more bytes than its windows hold.
#[tokio::test]
async fn the_client_of_another_implementation_gets_back_what_it_sends() {
    gets_back(20_000, 30_000, 24, 400_000).await;
}

proptest::proptest! {
    /// The same with any pipe between them, any window of the client, and any number of calls and bytes.
    #[test]
    fn the_client_of_another_implementation_agrees(
        pipe in 1_usize..70_000,
        window in 1_u32..100_000,
        calls in 1_usize..12,
        bytes in 0_usize..60_000,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(gets_back(pipe, window, calls, bytes));
    }
}

/// Calls over a pipe that holds so many bytes, by a client with this window, send and get back so many bytes and a few more.
async fn gets_back(pipe: usize, window: u32, calls_count: usize, bytes: usize) {
    let (near, far) = tokio::io::duplex(pipe);
    let server = async {
        let connection = accept(near, LIMITS, &budget(), None).await;
        let connection = connection.expect("HTTP/2");
        let never = CancellationToken::new();
        connection
            .serve(EVERY, never, |call, arrival| {
                assert_eq!(&arrival.head.path[..], b"/a/b");
                Some(Box::pin(echo(call)))
            })
            .await
    };
    let client = async {
        let mut builder = h2::client::Builder::new();
        builder.initial_window_size(window);
        let handshake = builder.handshake::<_, Bytes>(far).await;
        let (requests, connection) = handshake.expect("HTTP/2");
        let (mut running, mut calls) = (JoinSet::new(), JoinSet::new());
        running.spawn(connection);
        for number in 0..calls_count {
            let mut requests = requests.clone();
            calls.spawn(async move {
                let request = Request::post("http://a/a/b").body(()).expect("a request");
                let (answer, mut send) = requests.send_request(request, false).expect("room");
                let sends: Vec<u8> = (0..bytes + number * 1_001)
                    .map(|at| u8::try_from((at * 7 + number) % 251).expect("below 251"))
                    .collect();
                let sent = sends.clone();
                let sending = async move {
                    let mut left = Bytes::from(sent);
                    let mut piece = 1 + number;
                    while !left.is_empty() {
                        send.reserve_capacity(piece.min(left.len()));
                        let granted = poll_fn(|cx| send.poll_capacity(cx)).await;
                        let granted = granted.expect("it is open").expect("it is open");
                        let part = left.split_to(granted.min(left.len()));
                        send.send_data(part, false).expect("it is open");
                        piece = piece * 3 % 50_000 + 1;
                    }
                    send.send_data(Bytes::new(), true).expect("it is open");
                };
                let receiving = async {
                    let answer = answer.await.expect("an answer");
                    assert_eq!(answer.headers()["content-type"], "application/grpc");
                    let mut body = answer.into_body();
                    let mut all = Vec::new();
                    while let Some(data) = body.data().await {
                        let data = data.expect("it is open");
                        body.flow_control()
                            .release_capacity(data.len())
                            .expect("it came");
                        all.extend_from_slice(&data);
                    }
                    let trailers = body.trailers().await.expect("it is open");
                    assert_eq!(trailers.expect("trailers")["grpc-status"], "0");
                    payloads(all)
                };
                let (_sent, received) = tokio::join!(sending, receiving);
                assert!(received == sends, "call {number}");
            });
        }
        calls.join_all().await;
        drop(requests);
        for end in running.join_all().await {
            end.expect("a good end");
        }
    };
    let (served, ()) = tokio::join!(server, client);
    served.expect("a good end");
}

/// Limit (times): A new HTTP/2 connection without a preface
#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_greet_is_closed() {
    let (near, mut far) = tokio::io::duplex(1 << 16);
    far.write_all(&PREFACE[..30]).await.expect("it is open");
    let start = Instant::now();
    let end = accept(near, LIMITS, &budget(), None).await;
    assert!(matches!(end, Err(CallsError::NoGreeting)));
    assert_eq!(start.elapsed(), GREETING_TIMEOUT);
}

/// Limit (times): HTTP/2 keepalive | a connection ends after 20 s without any byte of the peer
#[tokio::test(start_paused = true)]
async fn a_sending_client_is_kept_despite_missing_ping_answers() {
    let (connection, mut far) = greeted().await;
    let serving = connection.serve(EVERY, CancellationToken::new(), |_call, _head| None);
    let mut serving = pin!(serving);
    for _frame in 0..30 {
        let going_on = timeout(Duration::from_secs(10), serving.as_mut()).await;
        assert!(going_on.is_err(), "{going_on:?}");
        // A frame that needs no answer.
        far.write_all(b"\0\0\x04\x08\0\0\0\0\0\0\0\0\x01")
            .await
            .expect("it is open");
    }
    let silent = Instant::now();
    let end = serving.await;
    assert!(matches!(end, Err(CallsError::Silent)), "{end:?}");
    assert!(silent.elapsed() <= 2 * PING_TIMEOUT);
}

/// POST to "/" of "a" by "http", with this number of a call.
fn headers(number: u32) -> Vec<u8> {
    let stream = (2 * number + 1).to_be_bytes();
    [&b"\0\0\x06\x01\x04"[..], &stream, b"\x83\x86\x84\x41\x01a"].concat()
}

fn reset(number: u32) -> Vec<u8> {
    let stream = (2 * number + 1).to_be_bytes();
    [&b"\0\0\x04\x03\0"[..], &stream, b"\0\0\0\x08"].concat()
}

/// Reads until the acknowledgement of a PING.
async fn pinged(far: &mut DuplexStream) {
    far.write_all(b"\0\0\x08\x06\0\0\0\0\0a number")
        .await
        .expect("it is open");
    until(far, b"\0\0\x08\x06\x01\0\0\0\0a number").await;
}

async fn until(far: &mut DuplexStream, wanted: &[u8]) {
    let mut said: Vec<u8> = Vec::new();
    while !said.windows(wanted.len()).any(|some| some == wanted) {
        let read = far.read_buf(&mut said).await;
        assert!(read.is_ok_and(|bytes| bytes > 0), "it is open");
    }
}

/// Calls that come too fast wait; a tunnel of the same connection does not notice.
///
/// Limit (peers): Calls of a gRPC client cancelled before the server accepted them | 4,096, then new calls wait for 1 ms for each, 4 s at most
#[tokio::test(start_paused = true)]
async fn a_flood_of_cancelled_calls_delays_new_calls_and_nothing_else() {
    const FLOOD: u32 = 10_000;
    let (connection, mut far) = greeted().await;
    let calls = Cell::new(0);
    let serving = connection.serve(EVERY, CancellationToken::new(), |call, _head| {
        calls.set(calls.get() + 1);
        Some(Box::pin(echo(call)))
    });
    let client = async {
        far.write_all(&headers(0)).await.expect("it is open");
        pinged(&mut far).await;
        assert_eq!(calls.get(), 1);
        for number in 1..=FLOOD {
            let cancelled = [headers(number), reset(number)].concat();
            far.write_all(&cancelled).await.expect("it is open");
        }
        let start = Instant::now();
        far.write_all(&headers(FLOOD + 1))
            .await
            .expect("it is open");
        for _echo in 0..100 {
            far.write_all(b"\0\0\x01\0\0\0\0\0\x01x")
                .await
                .expect("it is open");
            until(&mut far, b"x").await;
        }
        assert!(start.elapsed() < Duration::from_millis(100));
        // A few come between a call and its end.
        let before = calls.get();
        assert!(before < 100, "{before} were taken");
        // As long as the flood was ahead of a thousand a second, and no longer than that.
        while calls.get() == before {
            sleep(Duration::from_millis(10)).await;
        }
        let took = start.elapsed().as_secs();
        assert!((3..=5).contains(&took), "{took}");
    };
    tokio::select! {
        end = serving => panic!("{end:?}"),
        () = client => (),
    }
}

/// A client that reads nothing, and asks for answers without end: the connection is read no more.
///
/// Limit (memory): Output of a gRPC client's connection | 128 KiB, 16 KiB where memory is bounded; at twice that it is not read
#[tokio::test(start_paused = true)]
async fn a_client_that_reads_no_answers_is_not_read() {
    let (near, mut far) = tokio::io::duplex(1 << 16);
    far.write_all(PREFACE).await.expect("it is open");
    let budget = budget();
    let connection = accept(near, LIMITS, &budget, None).await.expect("HTTP/2");
    let serving = connection.serve(EVERY * 100, CancellationToken::new(), |_call, _head| None);
    let mut sent = 0;
    let flood = async {
        let pings = b"\0\0\x08\x06\0\0\0\0\0a number".repeat(1000);
        loop {
            for part in pings.chunks(1_000) {
                far.write_all(part).await.expect("it is open");
                sent += part.len();
            }
        }
    };
    let end = timeout(Duration::from_secs(10), async {
        tokio::select! {
            end = serving => panic!("{end:?}"),
            () = flood => (),
        }
    });
    assert!(end.await.is_err());
    let most = 2 * LIMITS.output_bytes + 2 * (1 << 16) + 2 * BULK_READ_BYTES * READS_PER_ROUND;
    assert!((1 << 16..most).contains(&sent), "{sent}");
}

/// The client is told at once, its calls go on, and the connection ends with the last of them.
#[tokio::test(start_paused = true)]
async fn a_connection_ends_with_its_last_call_once_the_process_leaves() {
    for answers in [true, false] {
        let (connection, mut far) = greeted().await;
        let leaving = CancellationToken::new();
        let serving = connection.serve(EVERY * 100, leaving.clone(), |call, _head| {
            Some(Box::pin(echo(call)))
        });
        let client = async {
            far.write_all(&headers(0)).await.expect("it is open");
            pinged(&mut far).await;
            leaving.cancel();
            until(&mut far, b"\0\0\x08\x06\0\0\0\0\0adit-bye").await;
            // On its way when the client is told.
            far.write_all(&headers(1)).await.expect("it is open");
            if answers {
                far.write_all(b"\0\0\x08\x06\x01\0\0\0\0adit-bye")
                    .await
                    .expect("it is open");
            }
            until(&mut far, b"\0\0\x08\x07\0\0\0\0\0\0\0\0\x03\0\0\0\0").await;
            let end = b"\0\0\0\0\x01\0\0\0\x01\0\0\0\0\x01\0\0\0\x03";
            far.write_all(end).await.expect("it is open");
            let mut rest = Vec::new();
            far.read_to_end(&mut rest).await.expect("a good end");
        };
        let (served, ()) = tokio::join!(serving, client);
        served.expect("a good end");
    }
}

/// Errors of the client's own making, which it is told by GOAWAY.
#[tokio::test(start_paused = true)]
async fn a_client_that_breaks_http2_is_told_and_its_calls_end() {
    let (connection, mut far) = greeted().await;
    let ended = Arc::new(AtomicBool::new(false));
    let serving = connection.serve(EVERY, CancellationToken::new(), |call, _head| {
        let ended = Arc::clone(&ended);
        Some(Box::pin(async move {
            echo(call).await;
            ended.store(true, Relaxed);
        }))
    });
    let client = async {
        far.write_all(&headers(0)).await.expect("it is open");
        pinged(&mut far).await;
        far.write_all(b"\0\0\0\x06\0\0\0\0\0")
            .await
            .expect("it is open");
        until(&mut far, b"\0\0\x08\x07\0\0\0\0\0\0\0\0\x01\0\0\0\x06").await;
    };
    let (served, ()) = tokio::join!(serving, client);
    let error = served.expect_err("it was broken").to_string();
    assert_eq!(
        error,
        "the peer broke HTTP/2: PING of another length than 8"
    );
    assert!(ended.load(Relaxed), "the call has ended");
}

/// The sizes reach the client: it has more in flight once its first bytes were taken.
#[tokio::test(start_paused = true)]
async fn a_client_gets_a_larger_window_when_its_bytes_move() {
    const LARGE: u32 = 256 * 1024;
    const TAKEN: usize = 128 * 1024;
    let bounds = MemoryBounds {
        room_bytes: 64 << 20,
        growth_bytes: 1 << 20,
        counts_tcp: false,
    };
    let budget = Arc::new(ProcessBudget::new(16 << 20).with_bounds(Some(bounds)));
    let windows = CallWindows::new(&budget, LARGE);
    let (near, far) = tokio::io::duplex(1 << 16);
    let limits = ServerLimits {
        window_bytes: BOUNDED_CALL_WINDOW_BYTES,
        ..LIMITS
    };
    let greeting = h2::client::Builder::new().handshake::<_, Bytes>(far);
    let (mut requests, driver) = greeting.await.expect("HTTP/2");
    let mut running = JoinSet::new();
    running.spawn(driver);
    let connection = accept(near, limits, &budget, Some(&windows)).await;
    let mut window = windows.open().expect("windows are small");
    let never = CancellationToken::new();
    let serving = connection
        .expect("HTTP/2")
        .serve(EVERY * 100, never, |mut call, _head| {
            let mut window = std::mem::replace(&mut window, windows.open().expect("room"));
            let mut taken = 0;
            // The tunnel takes so many bytes, and no more.
            Some(Box::pin(poll_fn(move |cx| {
                while taken < TAKEN
                    && let Poll::Ready(Some(Ok(data))) = call.poll_data(cx)
                {
                    taken += data.len();
                    call.release(data.len());
                    window.moved(data.len());
                }
                window.wait(taken >= TAKEN);
                Poll::Pending
            })))
        });
    let request = Request::post("http://a/b").body(()).expect("a request");
    let (_response, mut send) = requests.send_request(request, false).expect("room");
    send.reserve_capacity(1 << 20);
    let mut sent = 0;
    let upload = poll_fn(|cx| {
        while let Poll::Ready(Some(Ok(granted))) = send.poll_capacity(cx) {
            sent += send
                .send_data(vec![0; granted].into(), false)
                .map_or(0, |()| granted);
        }
        Poll::<()>::Pending
    });
    let end = timeout(Duration::from_secs(60), async {
        tokio::select! {
            end = serving => panic!("{end:?}"),
            end = running.join_next() => panic!("{end:?}"),
            () = upload => (),
        }
    });
    assert!(end.await.is_err());
    assert!(
        sent - TAKEN >= LARGE as usize - 2 * 16 * 1024,
        "{sent} sent"
    );
}

/// A layer that takes bytes and hands them on only when flushed, and not at the first time of asking, as TLS may.
struct Holding {
    pipe: DuplexStream,
    held: Vec<u8>,
    is_asked: bool,
}

impl AsyncRead for Holding {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut tokio::io::ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.pipe).poll_read(cx, out)
    }
}

impl AsyncWrite for Holding {
    fn poll_write(
        mut self: Pin<&mut Self>,
        _cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.held.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.is_asked && !self.held.is_empty() {
            self.is_asked = true;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let this = &mut *self;
        this.is_asked = false;
        while !this.held.is_empty() {
            let written = ready!(Pin::new(&mut this.pipe).poll_write(cx, &this.held))?;
            this.held.drain(..written);
        }
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.pipe).poll_shutdown(cx)
    }
}

/// What a layer below holds goes out when it can, not with the next bytes.
#[tokio::test(start_paused = true)]
async fn what_a_layer_below_holds_is_flushed_until_it_is_gone() {
    let (pipe, mut far) = tokio::io::duplex(1 << 16);
    far.write_all(PREFACE).await.expect("it is open");
    let near = Holding {
        pipe,
        held: Vec::new(),
        is_asked: false,
    };
    let connection = accept(near, LIMITS, &budget(), None).await.expect("HTTP/2");
    let serving = connection.serve(EVERY * 100, CancellationToken::new(), |call, _head| {
        Some(Box::pin(echo(call)))
    });
    let client = async {
        let mut far = far;
        far.write_all(&headers(0)).await.expect("it is open");
        for _echo in 0..3 {
            far.write_all(b"\0\0\x01\0\0\0\0\0\x01x")
                .await
                .expect("it is open");
            until(&mut far, b"x").await;
        }
    };
    tokio::select! {
        end = serving => panic!("{end:?}"),
        answered = timeout(Duration::from_secs(5), client) => answered.expect("answers"),
    }
}

/// A download over a slow socket keeps no other call of its connection waiting.
#[tokio::test(start_paused = true)]
async fn a_connection_is_read_while_a_download_waits_for_its_socket() {
    let (connection, mut far) = greeted().await;
    let taken = Arc::new(AtomicUsize::new(0));
    let mut is_first = true;
    let serving = connection.serve(EVERY * 100, CancellationToken::new(), |mut call, _head| {
        if std::mem::take(&mut is_first) {
            return Some(Box::pin(poll_fn(move |cx| {
                while call.poll_drained(cx).is_ready() {
                    let (conn, bytes) = (ConnId(1), vec![7; 100_000].into());
                    call.send(MessageBuf::packet(Packet::Data { conn, bytes }));
                }
                Poll::Pending
            })) as Admitted);
        }
        let taken = Arc::clone(&taken);
        Some(Box::pin(async move {
            while let Some(Ok(bytes)) = poll_fn(|cx| call.poll_data(cx)).await {
                call.release(bytes.len());
                taken.fetch_add(bytes.len(), Relaxed);
            }
        }))
    });
    let client = async {
        // SETTINGS are acknowledged, windows without end, and a download that fills pipe and output.
        let windows = b"\0\0\0\x04\x01\0\0\0\0\0\0\x06\x04\0\0\0\0\0\0\x04\x7f\xff\xff\xff\0\0\x04\x08\0\0\0\0\0\x7f\xff\0\0";
        far.write_all(windows).await.expect("it is open");
        far.write_all(&headers(0)).await.expect("it is open");
        far.write_all(&headers(1)).await.expect("it is open");
        for _frame in 0..20 {
            let data = [&b"\0\x27\x10\0\0\0\0\0\x03"[..], &[1; 10_000]].concat();
            far.write_all(&data).await.expect("it is open");
        }
    };
    let end = timeout(Duration::from_secs(5), async {
        tokio::select! {
            end = serving => panic!("{end:?}"),
            () = async { client.await; std::future::pending().await } => (),
        }
    });
    assert!(end.await.is_err());
    assert_eq!(taken.load(Relaxed), 200_000);
}
