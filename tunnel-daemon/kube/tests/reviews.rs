//! Tests of token reviews against an API server that is unreachable, slow, faulty or hostile.

mod support;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use adit_kube::access::{Api, Source};
use adit_kube::account::ServiceAccount;
use adit_kube::review_policy::{ReviewError, ReviewPolicy};
use adit_kube::reviewer::{Caller, Rate, ReviewEvents, ReviewResult, Reviewer};
use adit_kube::token::Token;
use futures_util::future::join_all;
use serde_json::json;
use support::{FakeApi, Fault, in_seconds, token};
use tempfile::TempDir;

const AGENT: &str = "system:serviceaccount:kube-system:konnectivity-agent";
const AUDIENCE: &str = "system:konnectivity-server";

#[derive(Default)]
struct Counted {
    results: Mutex<Vec<ReviewResult>>,
    in_flight: Mutex<usize>,
}

impl ReviewEvents for Counted {
    fn reviewed(&self, result: ReviewResult, _time: Duration) {
        self.results.lock().expect("a list").push(result);
    }

    fn in_flight(&self, reviews: usize) {
        *self.in_flight.lock().expect("a list") = reviews;
    }
}

struct World {
    api: FakeApi,
    reviewer: Arc<Reviewer>,
    counted: Arc<Counted>,
    folder: TempDir,
}

fn policy() -> ReviewPolicy {
    ReviewPolicy {
        namespace: "kube-system".to_owned(),
        service_account: "konnectivity-agent".to_owned(),
        audience: AUDIENCE.to_owned(),
    }
}

const UNLIMITED: Rate = Rate {
    per_second: 0.0,
    burst: 0,
};

async fn world_with(rate: Rate) -> World {
    let api = FakeApi::start().await;
    let folder = tempfile::tempdir().expect("it works");
    let file = folder.path().join("kubeconfig");
    api.write_kubeconfig(&file);
    let opened = Api::open(Source::Kubeconfig(file)).await.expect("it works");
    let counted = Arc::new(Counted::default());
    let reviewer = Reviewer::new(
        opened,
        policy(),
        rate,
        Arc::clone(&counted) as Arc<dyn ReviewEvents>,
    );
    World {
        api,
        reviewer: Arc::new(reviewer),
        counted,
        folder,
    }
}

async fn world() -> World {
    world_with(UNLIMITED).await
}

fn at(last: u8) -> Caller {
    Caller {
        address: Some([10, 0, 0, last].into()),
        is_trusted: false,
    }
}

impl World {
    async fn review(&self, token: &str) -> Result<Arc<ServiceAccount>, ReviewError> {
        self.reviewer.review(&Token::new(token), at(1)).await
    }

    async fn refusal(&self, token: &str) -> String {
        self.review(token).await.expect_err("a refusal").to_string()
    }

    fn results(&self) -> Vec<ReviewResult> {
        self.counted.results.lock().expect("a list").clone()
    }
}

/// A kubeconfig in `folder` for this API server, whose user authenticates this way.
async fn open_as(api: &FakeApi, folder: &TempDir, user: serde_json::Value) -> Arc<Api> {
    let file = folder.path().join("kubeconfig");
    let mut kubeconfig: serde_json::Value = serde_json::from_str(&api.kubeconfig()).expect("JSON");
    kubeconfig["users"][0]["user"] = user;
    std::fs::write(&file, kubeconfig.to_string()).expect("a file");
    Api::open(Source::Kubeconfig(file))
        .await
        .expect("a kubeconfig")
}

/// A user whose credentials come from this plugin.
fn plugin_of(command: impl serde::Serialize, args: &[&std::path::Path]) -> serde_json::Value {
    json!({"exec": {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": command,
        "args": args,
        "interactiveMode": "Never",
    }})
}

/// A reviewer without a limit on the rate.
fn reviewer_of(api: Arc<Api>) -> Reviewer {
    Reviewer::new(api, policy(), UNLIMITED, Arc::new(Counted::default()))
}

/// The `Authorization` header of the last request.
fn authorization(api: &FakeApi) -> String {
    let (_path, headers, _body) = api
        .state
        .lock()
        .expect("the state")
        .last
        .clone()
        .expect("a request");
    headers["authorization"].to_str().expect("text").to_owned()
}

#[tokio::test]
async fn a_review_sends_upstreams_request_and_returns_node_and_pod() {
    let world = world().await;
    let token = world.api.issue(AGENT, AUDIENCE, "node-1");
    let account = world.review(&token).await.unwrap();
    let owner = "serviceaccount=kube-system/konnectivity-agent node=node-1";
    assert_eq!(account.owner(), owner);
    assert_eq!(account.pod_uid.as_deref(), Some("uid-node-1"));
    let (path, headers, body) = world.api.state.lock().unwrap().last.clone().unwrap();
    assert_eq!(path, "/apis/authentication.k8s.io/v1/tokenreviews");
    assert_eq!(headers["authorization"], "Bearer of-the-server");
    let spec = json!({"token": token, "audiences": [AUDIENCE]});
    assert_eq!(body["spec"], spec);
    assert_eq!(body["apiVersion"], "authentication.k8s.io/v1");
    assert_eq!(body["kind"], "TokenReview");
    assert_eq!(world.results(), [ReviewResult::Ok]);
    assert_eq!(*world.counted.in_flight.lock().unwrap(), 0);
}

#[tokio::test]
async fn many_callers_with_one_token_cost_one_review() {
    let world = world().await;
    world.api.state.lock().unwrap().takes = Duration::from_millis(20);
    let token = world.api.issue(AGENT, AUDIENCE, "");
    let all = join_all((0..50).map(|_| world.review(&token))).await;
    assert!(all.iter().all(Result::is_ok));
    world.review(&token).await.unwrap();
    assert_eq!(world.api.reviews(), 1);
}

#[tokio::test]
async fn tokens_with_invalid_claims_cause_no_review() {
    let world = world().await;
    let claims = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut claims = json!({"sub": AGENT, "aud": [AUDIENCE], "exp": in_seconds(600)});
        change(&mut claims);
        token(&claims)
    };
    let not_valid = "lookup failed: service account jwt not valid";
    assert_eq!(world.refusal("opaque").await, not_valid);
    let other_account = "system:serviceaccount:default:konnectivity-agent";
    let other_namespace =
        "lookup failed: incoming request from \"default\" namespace. Expected \"kube-system\"";
    for (claim, value, text) in [
        ("exp", json!(1_000_000), not_valid),
        ("aud", json!(["other"]), not_valid),
        ("sub", json!(other_account), other_namespace),
    ] {
        let token = claims(&|claims| claims[claim] = value.clone());
        assert_eq!(world.refusal(&token).await, text);
    }
    assert_eq!(world.api.reviews(), 0);
    // The API server refuses an unsigned token; the refusal is cached, so the next attempts cause no review.
    let unknown = claims(&|_claims| ());
    for _try in 0..3 {
        let text = "lookup failed: [invalid bearer token, unknown]";
        assert_eq!(world.refusal(&unknown).await, text);
    }
    assert_eq!(world.api.reviews(), 1);
    assert_eq!(world.results(), [ReviewResult::Denied]);
}

/// Limit (sizes): Answer of the API server | 1 MiB
#[tokio::test]
async fn an_invalid_review_answer_refuses_the_agent_and_is_not_cached() {
    let world = world().await;
    let token = world.api.issue(AGENT, AUDIENCE, "");
    let status = json!({"kind": "Status", "message": "rate: limited", "code": 429});
    let no_json = "cannot parse the answer of the API server: expected value at line 1 column 1";
    let too_long = "the API server's answer is longer than 1048576 bytes";
    let (status, spaces) = (status.to_string(), " ".repeat(3 << 20));
    for (code, body, text) in [
        (429, &*status, "rate: limited (HTTP status 429)"),
        (500, "oh no", "Internal Server Error (HTTP status 500)"),
        (201, "<html>", no_json),
        (201, &*spaces, too_long),
    ] {
        let body = body.to_owned().into();
        world.api.set_fault(Some(Fault::Answer(code, body)));
        let text = format!("Failed to authenticate request. err:{text}");
        assert_eq!(world.refusal(&token).await, text);
    }
    // An answer without a complete status does not authenticate.
    let authenticated = r#"{"status":{"authenticated":true}}"#;
    for body in ["{}", r#"{"status":{}}"#, authenticated] {
        world.api.set_fault(Some(Fault::Answer(201, body.into())));
        let other = world.api.issue(AGENT, AUDIENCE, "");
        let refused = world.refusal(&other).await;
        assert!(refused.starts_with("lookup failed: "), "{body}: {refused}");
    }
    world.api.set_fault(None);
    world.review(&token).await.unwrap();
}

#[tokio::test]
async fn a_refused_api_connection_is_reported() {
    let world = world().await;
    let token = world.api.issue(AGENT, AUDIENCE, "");
    // A bound socket without a listener, so that no other process gets its port.
    let silent = tokio::net::TcpSocket::new_v4().unwrap();
    silent.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let nobody = silent.local_addr().unwrap();
    let file = world.folder.path().join("nobody");
    let elsewhere = world
        .api
        .kubeconfig()
        .replace(&world.api.address.to_string(), &nobody.to_string());
    std::fs::write(&file, elsewhere).unwrap();
    let api = Api::open(Source::Kubeconfig(file)).await.unwrap();
    assert_eq!(api.address(), format!("http://{nobody}"));
    let reviewer = reviewer_of(api);
    let refused = reviewer.review(&Token::new(token), at(1)).await;
    let refused = refused.unwrap_err().to_string();
    let ending = "cannot reach the API server: Connection refused";
    assert!(refused.ends_with(ending), "{refused}");
}

/// At most 32 reviews run at once, for all callers together.
///
/// Limit (peers): Token reviews | 32 at once; 1,024 callers wait, half of them reserved for addresses with a link. 16
/// per address without a link
#[tokio::test]
async fn at_most_32_reviews_run_at_once() {
    let world = world().await;
    world.api.state.lock().unwrap().takes = Duration::from_millis(5);
    let tokens: Vec<String> = (0..200)
        .map(|_| world.api.issue(AGENT, AUDIENCE, ""))
        .collect();
    let reviews = tokens.iter().zip(0_u8..).map(|(token, n)| {
        let (reviewer, token) = (Arc::clone(&world.reviewer), Token::new(token.as_str()));
        async move { reviewer.review(&token, at(n)).await }
    });
    let all = join_all(reviews).await;
    assert!(all.iter().all(Result::is_ok));
    let (under_way, most) = world.api.state.lock().unwrap().at_once;
    assert_eq!((under_way, most <= 32, most > 8), (0, true, true), "{most}");
}

/// Unknown peers fill the queue of their address while the API server does not answer.
///
/// Limit (peers): Token reviews
#[tokio::test]
async fn callers_waiting_for_a_silent_api_server_are_bounded() {
    let world = world().await;
    world.api.set_fault(Some(Fault::Silence));
    let waiting: Vec<_> = (0..32 + 16)
        .map(|_| {
            let token = Token::new(world.api.issue(AGENT, AUDIENCE, ""));
            let reviewer = Arc::clone(&world.reviewer);
            let mut review = Box::pin(async move { reviewer.review(&token, at(1)).await });
            assert!(futures_util::FutureExt::now_or_never(&mut review).is_none());
            review
        })
        .collect();
    let token = world.api.issue(AGENT, AUDIENCE, "");
    let refused = world.review(&token).await.unwrap_err();
    assert!(matches!(refused, ReviewError::Overload), "{refused}");
    assert_eq!(world.results(), [ReviewResult::Overload]);
    // Dropped callers free their review slots and their places in the queue.
    drop(waiting);
    world.api.set_fault(None);
    world.review(&token).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_silent_api_server_times_out() {
    let world = world().await;
    world.api.set_fault(Some(Fault::Silence));
    let token = world.api.issue(AGENT, AUDIENCE, "");
    let began = tokio::time::Instant::now();
    let text = "Failed to authenticate request. err:no answer from the API server in time";
    assert_eq!(world.refusal(&token).await, text);
    let took = began.elapsed();
    assert!(took < Duration::from_secs(11), "{took:?}");
    assert_eq!(world.results(), [ReviewResult::Timeout]);
}

#[tokio::test(start_paused = true)]
async fn answers_are_cached_for_seconds_and_not_beyond_token_expiry() {
    let world = world().await;
    let token = world.api.issue(AGENT, AUDIENCE, "");
    for _try in 0..2 {
        world.review(&token).await.unwrap();
        tokio::time::sleep(Duration::from_secs(9)).await;
    }
    assert_eq!(world.api.reviews(), 1);
    tokio::time::sleep(Duration::from_secs(2)).await;
    world.review(&token).await.unwrap();
    assert_eq!(world.api.reviews(), 2);
    // A token expired by less than the allowed clock skew is reviewed each time.
    let ended = json!({"sub": AGENT, "aud": [AUDIENCE], "exp": in_seconds(0)});
    let ended = support::token(&ended);
    let user = json!({"username": AGENT, "audience": AUDIENCE, "extra": {}});
    world
        .api
        .state
        .lock()
        .unwrap()
        .accounts
        .insert(ended.clone(), user);
    for _try in 0..2 {
        world.review(&ended).await.unwrap();
    }
    assert_eq!(world.api.reviews(), 4);
}

#[tokio::test(start_paused = true)]
async fn reviews_are_rate_limited() {
    let rate = Rate {
        per_second: 5.0,
        burst: 2,
    };
    let world = world_with(rate).await;
    let began = tokio::time::Instant::now();
    for _review in 0..12 {
        let token = world.api.issue(AGENT, AUDIENCE, "");
        world.review(&token).await.unwrap();
    }
    let seconds = began.elapsed().as_secs_f64();
    assert!((1.9..3.0).contains(&seconds), "{seconds}");
}

/// KKP and k0s replace the kubeconfig of a running server.
///
/// Upstream (configuration): Replaced certificates, CAs, tokens and kubeconfigs are used from the next handshake on.
#[tokio::test(start_paused = true)]
async fn a_replaced_kubeconfig_is_used_and_a_broken_one_is_ignored() {
    let world = world().await;
    let token = world.api.issue(AGENT, AUDIENCE, "");
    world.review(&token).await.unwrap();
    let file = world.folder.path().join("kubeconfig");
    std::fs::write(&file, "{").unwrap();
    tokio::time::sleep(Duration::from_secs(11)).await;
    world.review(&token).await.unwrap();
    assert_eq!(world.api.reviews(), 2, "the last configuration is in use");
    let next = FakeApi::start().await;
    next.write_kubeconfig(&file);
    tokio::time::sleep(Duration::from_secs(11)).await;
    let refused = world.refusal(&token).await;
    assert!(
        refused.contains("unknown"),
        "the other API server knows no such token"
    );
    assert_eq!((world.api.reviews(), next.reviews()), (2, 1));
}

/// Upstream (configuration): Replaced certificates, CAs, tokens and kubeconfigs are used from the next handshake on.
#[tokio::test]
async fn a_token_file_is_trimmed_and_read_again() {
    let api = FakeApi::start().await;
    let folder = tempfile::tempdir().unwrap();
    let secret = folder.path().join("token");
    std::fs::write(&secret, "first\n").unwrap();
    let opened = open_as(&api, &folder, json!({"tokenFile": "token"})).await;
    let reviewer = reviewer_of(opened);
    let mut authorised = Vec::new();
    for content in ["first\n", "second\n"] {
        std::fs::write(&secret, content).unwrap();
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(2)).await;
        tokio::time::resume();
        let token = api.issue(AGENT, AUDIENCE, "");
        reviewer.review(&Token::new(token), at(1)).await.unwrap();
        authorised.push(authorization(&api));
    }
    assert_eq!(authorised, ["Bearer first", "Bearer second"]);
}

/// Upstream runs the plugin at the first request.
#[tokio::test]
async fn a_credential_plugin_is_not_run_to_read_its_certificate() {
    let api = FakeApi::start().await;
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let opened = open_as(&api, &folder, plugin_of("touch", &[&run])).await;
    assert_eq!(opened.client_certificate().await, None);
    assert!(!run.exists());
}

/// Why a kubeconfig cannot be opened.
async fn failure(file: std::path::PathBuf) -> String {
    let opened = Api::open(Source::Kubeconfig(file)).await;
    opened.expect_err("no kubeconfig").to_string()
}

#[tokio::test]
async fn an_unusable_kubeconfig_is_an_error_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let open = |name: &str, content: &str| {
        let file = folder.path().join(name);
        std::fs::write(&file, content).unwrap();
        failure(file)
    };
    let missing = failure("/nonexistent/kubeconfig".into()).await;
    assert!(missing.contains("/nonexistent/kubeconfig"));
    assert!(open("empty", "").await.contains("current-context"));
    let ca = r#"{"current-context":"a","contexts":[{"name":"a","context":{"cluster":"a"}}],
        "clusters":[{"name":"a","cluster":{"server":"https://a","certificate-authority":"gone.pem"}}]}"#;
    assert!(open("ca", ca).await.contains("gone.pem"));
    let token = r#"{"current-context":"a","contexts":[{"name":"a","context":{"cluster":"a","user":"u"}}],
        "clusters":[{"name":"a","cluster":{"server":"https://a"}}],"users":[{"name":"u","user":{"tokenFile":"gone"}}]}"#;
    assert!(open("token", token).await.contains("gone"));
}

/// Cloud providers use such plugins. The plugin runs at the first request, so a missing plugin does not prevent the
/// start.
#[tokio::test]
async fn a_credential_plugin_gives_the_token() {
    use std::os::unix::fs::PermissionsExt as _;
    let api = FakeApi::start().await;
    let folder = tempfile::tempdir().unwrap();
    let plugin = folder.path().join("plugin");
    let opened = open_as(&api, &folder, plugin_of(&plugin, &[])).await;
    let reviewer = reviewer_of(opened);
    let token = api.issue(AGENT, AUDIENCE, "");
    let refused = reviewer.review(&Token::new(token.as_str()), at(1)).await;
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("auth exec"), "{refused}");
    let answer = json!({
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": {"token": "of-the-plugin"},
    });
    std::fs::write(&plugin, format!("#!/bin/sh\ncat <<'END'\n{answer}\nEND\n")).unwrap();
    std::fs::set_permissions(&plugin, std::fs::Permissions::from_mode(0o755)).unwrap();
    reviewer.review(&Token::new(token), at(1)).await.unwrap();
    assert_eq!(authorization(&api), "Bearer of-the-plugin");
}
