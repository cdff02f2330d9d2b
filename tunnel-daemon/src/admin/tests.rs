//! The admin thread with real sockets: what a scraper, a prober and a hostile peer see.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::Arc;

use super::*;
use crate::probes::{HttpService, Readiness, ReadinessStyle};
use adit_telemetry::ServerMetrics;

/// Longer than anything here takes; a test that waits this long has failed.
const PATIENCE: Duration = Duration::from_secs(20);

/// A port of a loopback address that only this process uses: what it frees is given to nobody else.
fn any_port() -> SocketAddr {
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    SocketAddr::from(([127, 64 | (high & 63), middle, low], 0))
}

/// Whether nobody listens there any more. Who waits in the queue of a listener that closes sees the end of its
/// connection, so this asks again instead of waiting.
fn is_free(address: SocketAddr) -> bool {
    (0..100).any(|_| match TcpStream::connect(address) {
        Ok(mut stream) => {
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            read_to_close(&mut stream);
            false
        }
        Err(error) => error.kind() == io::ErrorKind::ConnectionRefused,
    })
}

fn start(limits: AdminLimits) -> (AdminThread, ServerMetrics) {
    let metrics = ServerMetrics::new(&["default"]);
    let thread = AdminThread::start(limits, metrics.adit().clone(), Tasks::new(1)).unwrap();
    (thread, metrics)
}

fn serve(limits: AdminLimits) -> (AdminThread, AdminListener, ServerMetrics) {
    let (thread, metrics) = start(limits);
    let service = HttpService::health(
        ReadinessStyle::Server,
        Arc::new(|| Readiness::Ready),
        metrics.scrape(),
        Arc::new(String::new),
    );
    let listener = thread.serve("health", any_port(), service).unwrap();
    (thread, listener, metrics)
}

fn connect(listener: &AdminListener) -> TcpStream {
    let stream = TcpStream::connect(listener.local_addr()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// All bytes until the peer closes; a reset counts as a close.
fn read_to_close(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), io::ErrorKind::ConnectionReset),
    }
    String::from_utf8(bytes).unwrap()
}

fn exchange(listener: &AdminListener, request: &str) -> String {
    let mut stream = connect(listener);
    stream.write_all(request.as_bytes()).unwrap();
    read_to_close(&mut stream)
}

/// The answer to the only request of a connection.
fn ask(listener: &AdminListener, method: &str, path: &str) -> String {
    let request = format!("{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    exchange(listener, &request)
}

#[test]
fn probe_and_scrape_are_answered_on_the_reported_port() {
    let (_thread, listener, _) = serve(AdminLimits::default());
    assert_ne!(listener.local_addr().port(), 0);
    let probe = ask(&listener, "GET", "/readyz");
    assert!(probe.starts_with("HTTP/1.1 200 OK\r\n"), "{probe}");
    assert!(probe.ends_with("\r\n\r\nok"), "{probe}");
    let scrape = exchange(&listener, "GET /metrics HTTP/1.0\r\n\r\n");
    let sample = "\nkonnectivity_network_proxy_server_http_connections 0\n";
    assert!(scrape.contains(sample), "{scrape}");
}

#[test]
fn head_gets_the_headers_and_no_body() {
    let (_thread, listener, _) = serve(AdminLimits::default());
    let answer = ask(&listener, "HEAD", "/healthz");
    assert!(answer.contains("content-length: 2\r\n"), "{answer}");
    assert!(answer.ends_with("\r\n\r\n"), "{answer}");
}

#[test]
fn several_requests_share_one_connection() {
    let (_thread, listener, _) = serve(AdminLimits::default());
    let two = "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    let answers = exchange(&listener, two);
    assert_eq!(answers.matches("HTTP/1.1 200 OK").count(), 2);
}

#[test]
fn slow_headers_time_out_without_delaying_other_requests() {
    let limits = AdminLimits {
        header_timeout: Duration::from_millis(200),
        ..AdminLimits::default()
    };
    let (_thread, listener, _) = serve(limits);
    let mut slow = connect(&listener);
    slow.write_all(b"GET /healthz HTTP/1.1\r\nHo").unwrap();
    let probe = ask(&listener, "GET", "/healthz");
    assert!(probe.ends_with("ok"), "{probe}");
    assert!(!read_to_close(&mut slow).contains("200"));
    let mut silent = connect(&listener);
    assert_eq!(read_to_close(&mut silent), "");
}

#[test]
fn oversized_headers_get_a_431() {
    let limits = AdminLimits {
        header_bytes_max: 8_192,
        ..AdminLimits::default()
    };
    let (_thread, listener, _) = serve(limits);
    let mut stream = connect(&listener);
    let request = format!("GET /healthz HTTP/1.1\r\nX: {}\r\n\r\n", "a".repeat(9_000));
    // The peer may answer and close before it has read everything.
    let _cut = stream.write_all(request.as_bytes());
    let answer = read_to_close(&mut stream);
    assert!(
        answer.is_empty() || answer.starts_with("HTTP/1.1 431 "),
        "{answer}"
    );
    assert!(!answer.contains("200"), "{answer}");
}

#[test]
fn a_connection_over_the_cap_closes_the_oldest_one() {
    let limits = AdminLimits {
        connections_max: 2,
        ..AdminLimits::default()
    };
    let (_thread, listener, metrics) = serve(limits);
    let mut idle: Vec<TcpStream> = (0..2).map(|_| connect(&listener)).collect();
    for stream in &mut idle {
        stream
            .write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            .unwrap();
        let mut seen = [0_u8; 12];
        stream.read_exact(&mut seen).unwrap();
        assert_eq!(&seen, b"HTTP/1.1 200");
    }
    let probe = ask(&listener, "GET", "/healthz");
    assert!(probe.ends_with("ok"), "{probe}");
    let closed = "adit_accept_errors_total{listener=\"admin\"} 1\n";
    assert!(metrics.scrape().text().contains(closed));
    read_to_close(&mut idle[0]);
    idle[1]
        .write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        .unwrap();
    assert!(read_to_close(&mut idle[1]).contains("HTTP/1.1 200"));
}

#[test]
fn idle_connection_ends_at_its_maximum_age() {
    let limits = AdminLimits {
        connection_life: Duration::from_millis(100),
        ..AdminLimits::default()
    };
    let (_thread, listener, _) = serve(limits);
    assert_eq!(read_to_close(&mut connect(&listener)), "");
}

#[test]
fn bind_errors_name_the_port_in_use() {
    let (thread, listener, _) = serve(AdminLimits::default());
    let error = thread
        .serve("admin", listener.local_addr(), HttpService::default())
        .unwrap_err();
    assert!(matches!(error, AdminError::Bind { .. }));
    let (text, address) = (error.to_string(), listener.local_addr());
    let start = format!("admin port: cannot listen on {address}: ");
    assert!(text.starts_with(&start), "{text}");
}

#[test]
fn dropped_listener_frees_its_port_and_leaves_the_other_serving() {
    let (thread, health, metrics) = serve(AdminLimits::default());
    let service = HttpService::server_admin(metrics.scrape());
    let admin = thread.serve("admin", any_port(), service).unwrap();
    let mut idle = connect(&health);
    idle.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        .unwrap();
    let address = health.local_addr();
    drop(health);
    read_to_close(&mut idle);
    assert!(is_free(address));
    let scrape = exchange(&admin, "GET /metrics HTTP/1.0\r\n\r\n");
    assert!(scrape.starts_with("HTTP/1.0 200 OK\r\n"), "{scrape}");
    drop(thread);
    assert!(is_free(admin.local_addr()));
}

/// Limit (operations): Listeners for health, metrics and administration | 256 connections, headers of 64 KiB, 60 s per
/// answer. Scrapes within 1 s share one text
#[test]
fn limits_are_256_connections_64_kibibytes_of_headers_and_60_seconds_for_an_answer() {
    let limits = AdminLimits::default();
    assert_eq!(limits.connections_max, 256);
    assert_eq!(limits.header_bytes_max, 64 << 10);
    assert_eq!(limits.answer_timeout, Duration::from_secs(60));
}

/// Limit (operations): Listeners for health, metrics and administration
#[tokio::test(start_paused = true)]
async fn an_unread_answer_ends_its_connection_after_sixty_seconds() {
    let metrics = ServerMetrics::new(&["default"]);
    let service = HttpService::server_admin(metrics.scrape());
    let (near, mut far) = tokio::io::duplex(64);
    let request = b"GET /metrics HTTP/1.1\r\n\r\n";
    let sent = tokio::io::AsyncWriteExt::write_all(&mut far, request).await;
    sent.unwrap();
    let (_close, closing) = watch::channel(false);
    let started = tokio::time::Instant::now();
    connection(near, any_port(), service, AdminLimits::default(), closing).await;
    assert_eq!(started.elapsed().as_secs(), 60);
}

/// A thread, and a service for its socket.
fn admin() -> (AdminThread, HttpService) {
    let (thread, metrics) = start(AdminLimits::default());
    (thread, HttpService::server_admin(metrics.scrape()))
}

#[test]
fn a_default_admin_socket_is_the_first_that_can_be_opened_and_none_fails_no_start() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    // Below a file there is no socket for any user.
    let never = file.join("server.sock");
    let good = dir.path().join("made/server.sock");
    let (thread, service) = admin();
    let open = |places: &[&PathBuf]| {
        let places = places.iter().map(|path| (*path).clone()).collect();
        let plan = AdminSocketPlan::Default(places);
        thread.serve_socket(&plan, service.clone()).unwrap()
    };
    assert!(open(&[&never]).is_none() && open(&[]).is_none());
    let first = open(&[&never, &good]).expect("the second place");
    assert_eq!(first.path(), good);
    let connected = std::os::unix::net::UnixStream::connect(&good);
    assert!(connected.is_ok());
    let other = dir.path().join("other.sock");
    assert!(open(&[&good, &other]).is_none(), "a second process");
    assert!(!other.exists(), "where no command looks first");
    let off = thread.serve_socket(&AdminSocketPlan::Off, service.clone());
    assert!(off.unwrap().is_none());
    for given in [&never, &good] {
        let plan = AdminSocketPlan::At(given.clone());
        let error = thread.serve_socket(&plan, service.clone()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(&given.display().to_string()), "{text}");
    }
}
