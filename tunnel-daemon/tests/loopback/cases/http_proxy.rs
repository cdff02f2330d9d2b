//! HTTP proxy frontends: requests with a whole URL and CONNECT, to real targets through an agent.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::curl::{page, run};
use super::gone_behind_bytes::fill;
use crate::support::connect::read_head;
use crate::support::lanes::TUNNELS;
use crate::support::skip::has_program;
use crate::support::targets;
use crate::support::wait::{until, within};
use crate::support::ways::Way;
use crate::support::world::{World, sample};

const TCP: [&str; 2] = [
    "--frontend=http-proxy=tcp:127.0.0.1:0",
    "--insecure-plaintext-frontend",
];

async fn client(world: &World) -> TcpStream {
    let frontend = world.server().frontends[0];
    TcpStream::connect(frontend).await.expect("it listens")
}

/// Sends a request and returns the head of the answer.
async fn ask(io: &mut TcpStream, request: &str) -> String {
    io.write_all(request.as_bytes()).await.expect("it is taken");
    read_head(io).await
}

fn get(target: &str) -> String {
    format!("GET http://{target}/ HTTP/1.1\r\nHost: {target}\r\n\r\n")
}

/// A web server that answers each request with the number of the connection, and what ends its last response.
async fn counting() -> (u16, adit_net::tasks::Tasks) {
    let connections = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    targets::serve(move |mut stream| {
        let number = connections.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        async move {
            loop {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(stream.read_u8().await?);
                }
                let answer = format!(
                    "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n{}",
                    number % 10
                );
                stream.write_all(answer.as_bytes()).await?;
            }
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_of_one_connection_reach_several_targets_on_connections_that_stay() {
    let (a, _a) = counting().await;
    let (b, _b) = counting().await;
    let (world, _agent) = World::linked(&TCP, &[]).await;
    let mut io = client(&world).await;
    for target in [a, b, a, b, a].map(|port| format!("127.0.0.1:{port}")) {
        let head = ask(&mut io, &get(&target)).await;
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
        let number = within("a body", io.read_u8()).await.unwrap();
        assert_eq!(number, b'0', "{target} got another connection");
    }
    let text = world.server().metrics.scrape().text();
    let opened = ["link", "lane", "peer"].map(|path| {
        sample(
            &text,
            &format!("adit_tunnels_opened_total{{path=\"{path}\"}}"),
        )
    });
    assert_eq!(opened.iter().flatten().sum::<f64>(), 2.0, "{opened:?}");
    // Some targets know a client by its connection.
    let mut other = client(&world).await;
    ask(&mut other, &get(&format!("127.0.0.1:{a}"))).await;
    assert_eq!(within("a body", other.read_u8()).await.unwrap(), b'1');
}

/// Its reset is behind the bytes that the target does not take.
///
/// Limit (times): An `http-proxy` client that is gone behind a stuck upload | noticed within 10 s
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_during_a_stuck_upload_ends_its_tunnel() {
    let (port, _target) = targets::deaf().await;
    let (world, _agent) = World::linked(&TCP, &[]).await;
    let mut io = client(&world).await;
    let head = format!(
        "POST http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: a\r\nContent-Length: {}\r\n\r\n",
        u64::MAX / 2
    );
    io.write_all(head.as_bytes()).await.unwrap();
    fill(&mut io).await;
    let open = || world.server().metrics.adit().open_tunnels().all().len();
    assert_eq!(open(), 1);
    adit_tunnel::reset_on_close(&io);
    drop(io);
    until("its tunnel has ended", || open() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connect_becomes_a_tunnel_on_each_kind_of_lane_even_after_a_request() {
    let (port, _target) = targets::echo().await;
    let (web, _web) = counting().await;
    for way in Way::ALL {
        if !way.is_possible("a_connect_becomes_a_tunnel_on_each_kind_of_lane_even_after_a_request")
        {
            continue;
        }
        let flags = [&TCP, way.flags()].concat();
        let (world, _agent) = World::warm(&flags, way.flags()).await;
        let mut io = client(&world).await;
        ask(&mut io, &get(&format!("127.0.0.1:{web}"))).await;
        within("a body", io.read_u8()).await.unwrap();
        let target = format!("127.0.0.1:{port}");
        let head = ask(
            &mut io,
            &format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\nearly"),
        )
        .await;
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
        let sent = targets::pattern(0, 2_000_000);
        let (mut reader, mut writer) = io.split();
        let writing = async {
            writer.write_all(&sent).await.unwrap();
            writer.shutdown().await.unwrap();
        };
        let mut received = Vec::new();
        let reading = async { reader.read_to_end(&mut received).await.unwrap() };
        within("the echo", async { tokio::join!(writing, reading) }).await;
        assert!(
            received == [b"early", &sent[..]].concat(),
            "{} bytes",
            received.len()
        );
    }
}

/// A response without a length ends with its connection; one that is cut off must not look complete.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_that_is_cut_off_reaches_the_client_as_such() {
    let (whole, _whole) = targets::serve(|mut stream| async move {
        stream.read_u8().await?;
        stream
            .write_all(b"HTTP/1.0 200 OK\r\n\r\nall of it")
            .await?;
        stream.shutdown().await
    })
    .await;
    let (cut, _cut) = targets::serve(|mut stream| async move {
        stream.read_u8().await?;
        stream.write_all(b"HTTP/1.0 200 OK\r\n\r\nhalf of").await?;
        stream.flush().await?;
        adit_tunnel::reset_on_close(&stream);
        Ok(())
    })
    .await;
    let (world, _agent) = World::linked(&TCP, &[]).await;
    for (port, is_whole) in [(whole, true), (cut, false)] {
        for version in ["1.1", "1.0"] {
            let mut io = client(&world).await;
            let target = format!("127.0.0.1:{port}");
            let request = format!(
                "GET http://{target}/ HTTP/{version}\r\nHost: {target}\r\nConnection: close\r\n\r\n"
            );
            let head = ask(&mut io, &request).await;
            let is_chunked = head.contains("ransfer-encoding: chunked\r\n");
            assert_eq!(is_chunked, version == "1.1", "{head}");
            let mut body = String::new();
            let end = within("the end", io.read_to_string(&mut body)).await;
            assert_eq!(end.is_ok(), is_whole, "{version}: {body:?}, {end:?}");
            let is_ended = !is_chunked || body.ends_with("0\r\n\r\n");
            assert!(is_ended || !is_whole, "{body:?}");
        }
    }
}

/// A client that leaves takes its request along, also from a target that says nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_ends_its_request() {
    let (deaf, _deaf) = targets::deaf().await;
    let (world, _agent) = World::linked(&TCP, &[]).await;
    let mut io = client(&world).await;
    let request = get(&format!("127.0.0.1:{deaf}"));
    io.write_all(request.as_bytes()).await.expect("it is taken");
    world.server_metric(TUNNELS, 1.0).await;
    drop(io);
    world.server_metric(TUNNELS, 0.0).await;
    let gone = "adit_tunnels_closed_total{reason=\"client_gone\"}";
    world.server_metric(gone, 1.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_have_a_status_a_cause_and_a_counter() {
    let (port, _target) = targets::echo().await;
    let (_held, closed) = targets::closed_port();
    let rules = [
        format!("--client-allow-target=127.0.0.1:{port}"),
        format!("--client-allow-target={closed}"),
    ];
    let flags = [&TCP[..], &[&rules[0], &rules[1]]].concat();
    let world = World::start(&flags).await;
    let mut io = client(&world).await;
    let head = ask(&mut io, &get(&closed.to_string())).await;
    assert!(
        head.starts_with("HTTP/1.1 503 ") && head.contains("error=destination_unavailable"),
        "{head}"
    );
    let _agent = world.agent("agent-1", &[]).await;
    world.links(1).await;
    for (target, status, cause) in [
        (closed.to_string(), "502", "connection_refused"),
        ("127.0.0.2:80".to_owned(), "403", "http_request_denied"),
        ("169.254.169.254".to_owned(), "403", "http_request_denied"),
    ] {
        for request in [
            get(&target),
            format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n"),
        ] {
            if request.starts_with("CONNECT") && !target.contains(':') {
                continue;
            }
            let mut io = client(&world).await;
            let head = ask(&mut io, &request).await;
            assert!(
                head.starts_with(&format!("HTTP/1.1 {status} ")),
                "{target}: {head}"
            );
            assert!(
                head.contains(&format!("proxy-status: adit; error={cause}\r\n")),
                "{target}: {head}"
            );
        }
    }
    world
        .server_metric("adit_dial_failures_total{reason=\"denied\"}", 3.0)
        .await;
}

/// A page over plain HTTP, and the same by CONNECT.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn curl_fetches_a_page_by_a_whole_url_and_by_connect() {
    if !has_program("curl", "curl_fetches_a_page_by_a_whole_url_and_by_connect") {
        return;
    }
    let (port, _page) = page().await;
    let (world, _agent) = World::linked(&TCP, &[]).await;
    let proxy = format!("http://{}", world.server().frontends[0]);
    let url = format!("http://127.0.0.1:{port}/");
    for more in [&[][..], &["--proxytunnel"], &["--http1.0"]] {
        let args = [
            &[
                "--silent",
                "--show-error",
                "--fail",
                "--proxy",
                &proxy,
                &url,
            ],
            more,
        ]
        .concat();
        let fetched = run("curl", &args);
        let errors = String::from_utf8_lossy(&fetched.stderr);
        assert_eq!(fetched.status.code(), Some(0), "{more:?}: {errors}");
        assert!(
            fetched.stdout == targets::pattern(0, fetched.stdout.len())
                && fetched.stdout.len() == super::curl::PAGE_BYTES,
            "{more:?}"
        );
    }
}
