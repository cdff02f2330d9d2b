//! Codes, bodies and headers of every path, without a socket.

use http_body_util::BodyExt as _;

use super::*;
use adit_telemetry::{AgentMetrics, ServerMetrics};

const DETAIL: &str = "[+]relay-engine epoll: asked for by name\n";

fn local() -> SocketAddr {
    "10.1.2.3:8094".parse().unwrap()
}

fn probe(readiness: Readiness) -> Arc<dyn ReadinessProbe> {
    Arc::new(move || readiness.clone())
}

fn not_ready(reason: &'static str) -> Arc<dyn ReadinessProbe> {
    probe(Readiness::NotReady(reason.into()))
}

fn server(probe: Arc<dyn ReadinessProbe>) -> HttpService {
    let metrics = ServerMetrics::new(&[]).scrape();
    let detail = Arc::new(|| DETAIL.to_owned());
    HttpService::health(ReadinessStyle::Server, probe, metrics, detail)
}

fn agent(probe: Arc<dyn ReadinessProbe>) -> HttpService {
    let metrics = AgentMetrics::new().scrape();
    let detail = Arc::new(|| DETAIL.to_owned());
    HttpService::health(ReadinessStyle::Agent, probe, metrics, detail)
}

async fn ask(
    service: &HttpService,
    method: Method,
    uri: &str,
    host: Option<&str>,
) -> (u16, String, http::HeaderMap) {
    let mut request = Request::builder().method(method).uri(uri);
    if let Some(host) = host {
        request = request.header(HOST, host);
    }
    let response = service.answer(&request.body(()).unwrap(), local()).await;
    let (parts, body) = response.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    (
        parts.status.as_u16(),
        String::from_utf8(body.to_vec()).unwrap(),
        parts.headers,
    )
}

async fn get(service: &HttpService, uri: &str) -> (u16, String) {
    let (status, body, _) = ask(service, Method::GET, uri, None).await;
    (status, body)
}

fn answer(status: u16, body: &str) -> (u16, String) {
    (status, body.to_owned())
}

#[tokio::test]
async fn server_without_agents_is_alive_but_not_ready() {
    let service = server(not_ready(NO_AGENT));
    assert_eq!(get(&service, "/healthz").await, answer(200, "ok"));
    assert_eq!(get(&service, "/livez").await, answer(200, "ok"));
    let none = "no connection to any proxy agent";
    assert_eq!(get(&service, "/readyz").await, answer(500, none));
    let all = format!("{none}\n{DETAIL}");
    assert_eq!(get(&service, "/ready?verbose").await, answer(500, &all));
}

#[tokio::test]
async fn server_with_agents_is_ready() {
    let service = server(probe(Readiness::Ready));
    assert_eq!(get(&service, "/readyz").await, answer(200, "ok"));
    assert_eq!(get(&service, "/ready").await, answer(200, "ok"));
    let lines = format!("[+]agent-connected ok\n{DETAIL}check passed\n");
    assert_eq!(get(&service, "/readyz?verbose").await, answer(200, &lines));
}

#[tokio::test]
async fn stopping_server_is_not_ready() {
    let service = server(not_ready(SHUTTING_DOWN));
    assert_eq!(get(&service, "/readyz").await, answer(500, "shutting down"));
}

#[tokio::test]
async fn draining_agent_is_ready_and_reports_draining() {
    let service = agent(probe(Readiness::Draining));
    let draining = answer(200, "ready, draining");
    assert_eq!(get(&service, "/readyz").await, draining);
    let lines =
        format!("[+]ping ok\n[+]server-connected ok\n[+]ready, draining\n{DETAIL}check passed\n");
    assert_eq!(get(&service, "/readyz?verbose").await, answer(200, &lines));
}

#[test]
fn process_with_an_ended_service_is_not_ready() {
    assert_eq!(Readiness::without(&[]), None);
    let text = "service tls-files, gauges has ended: restart this process";
    let without = Readiness::without(&["tls-files", "gauges"]);
    assert_eq!(without, Some(Readiness::NotReady(text.into())));
}

#[tokio::test]
async fn agent_without_servers_lists_its_checks_with_503() {
    let service = agent(not_ready(NO_SERVER));
    let lines = "[+]ping ok\n[-]server-connected failed: no servers connected\n";
    assert_eq!(get(&service, "/readyz").await, answer(503, lines));
    assert_eq!(get(&service, "/ready").await, answer(503, lines));
    let all = format!("{lines}{DETAIL}");
    assert_eq!(get(&service, "/readyz?verbose").await, answer(503, &all));
    assert_eq!(get(&service, "/healthz").await, answer(200, "ok"));
}

#[tokio::test]
async fn ready_agent_lists_its_checks_only_when_asked() {
    let service = agent(probe(Readiness::Ready));
    let lines = format!("[+]ping ok\n[+]server-connected ok\n{DETAIL}check passed\n");
    assert_eq!(get(&service, "/readyz").await, answer(200, "ok"));
    for uri in ["/readyz?verbose", "/readyz?a=b&verbose=0"] {
        assert_eq!(get(&service, uri).await, answer(200, &lines), "{uri}");
    }
    assert_eq!(get(&service, "/readyz?verbosely").await, answer(200, "ok"));
}

#[tokio::test]
async fn metrics_are_served_as_prometheus_text() {
    let service = HttpService::server_admin(ServerMetrics::new(&["default"]).scrape());
    let (status, body, headers) = ask(&service, Method::GET, "/metrics", None).await;
    assert_eq!(status, 200);
    let prometheus = "text/plain; version=0.0.4; charset=utf-8";
    assert_eq!(headers[CONTENT_TYPE], prometheus);
    let line = "\nkonnectivity_network_proxy_server_ready_backend_connections 0\n";
    assert!(body.contains(line), "{body}");
}

#[tokio::test]
async fn agent_admin_sends_scrapers_to_the_health_port_of_the_same_host() {
    let service = HttpService::agent_admin(8_093);
    let cases = [
        (Some("node-1:8094"), "//node-1:8093/metrics?x=1"),
        (Some("node-1"), "//node-1:8093/metrics?x=1"),
        (Some("[::1]:8094"), "//[::1]:8093/metrics?x=1"),
        (Some("[::1]"), "//[::1]:8093/metrics?x=1"),
        (Some("evil/@x:1"), "//10.1.2.3:8093/metrics?x=1"),
        (None, "//10.1.2.3:8093/metrics?x=1"),
    ];
    for (host, location) in cases {
        let (status, _, headers) = ask(&service, Method::GET, "/metrics?x=1", host).await;
        assert_eq!(status, 301, "{host:?}");
        assert_eq!(headers[LOCATION], location, "{host:?}");
    }
}

#[tokio::test]
async fn profiles_are_answered_with_a_hint() {
    let admin = HttpService::server_admin(ServerMetrics::new(&[]).scrape());
    for path in [
        "/debug/pprof",
        "/debug/pprof/",
        "/debug/pprof/profile?seconds=1",
    ] {
        let (status, body) = get(&admin, path).await;
        assert_eq!(status, 404, "{path}: {body}");
        assert!(body.contains("perf record"), "{path}: {body}");
        assert_eq!(get(&HttpService::agent_admin(1), path).await.0, 404);
    }
    let unknown = answer(404, "404 page not found\n");
    assert_eq!(get(&admin, "/debug/pprofile").await, unknown);
}

#[tokio::test]
async fn unknown_paths_are_404_and_other_methods_405() {
    let service = server(probe(Readiness::Ready));
    for path in ["/", "/healthz/", "/metricsx", "//healthz"] {
        let unknown = answer(404, "404 page not found\n");
        assert_eq!(get(&service, path).await, unknown, "{path}");
    }
    let (status, _, headers) = ask(&service, Method::POST, "/healthz", None).await;
    assert_eq!(status, 405);
    assert_eq!(headers[ALLOW], "GET, HEAD");
    assert_eq!(ask(&service, Method::HEAD, "/healthz", None).await.0, 200);
}

#[tokio::test]
async fn readiness_is_answered_from_the_data_runtime() {
    let (asker, questions) = readiness_channel();
    let mut answers = [Readiness::NotReady(NO_AGENT.into()), Readiness::Ready].into_iter();
    let answering = questions.answer(move || answers.next().unwrap());
    let asking = async {
        assert_eq!(asker.check().await, Readiness::NotReady(NO_AGENT.into()));
        assert_eq!(asker.check().await, Readiness::Ready);
        drop(asker);
    };
    tokio::select! {
        () = answering => panic!("it rests when nobody asks"),
        () = asking => (),
    }
}

#[tokio::test(start_paused = true)]
async fn silent_data_runtime_is_not_ready_after_a_second() {
    let (asker, questions) = readiness_channel();
    let asked = tokio::time::Instant::now();
    let silent = asker.check().await;
    assert!(matches!(silent, Readiness::NotReady(why) if why.contains("did not answer")));
    assert_eq!(asked.elapsed(), READINESS_TIMEOUT);
    drop(questions);
    let gone = asker.check().await;
    assert!(matches!(gone, Readiness::NotReady(_)), "gone");
}

/// Limit (operations): Queued readiness checks | 64 per process
#[tokio::test(start_paused = true)]
async fn readiness_checks_beyond_the_queue_are_refused_at_once() {
    let (asker, _questions) = readiness_channel();
    let checks = (0..QUESTIONS_MAX).map(|_| asker.check());
    let mut waiting: Vec<_> = checks.collect();
    for check in &mut waiting {
        assert!(tokio::time::timeout(Duration::ZERO, check).await.is_err());
    }
    let asked = tokio::time::Instant::now();
    assert!(matches!(asker.check().await, Readiness::NotReady(_)));
    assert_eq!(asked.elapsed(), Duration::ZERO);
}
