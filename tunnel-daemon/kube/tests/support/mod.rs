//! A fake API server with scripted answers, issued tokens and leases.

#![allow(dead_code, reason = "not every test has a use for all of it")]

mod leases;

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// The body of an answer.
pub(crate) type Answer = UnsyncBoxBody<Bytes, Infallible>;

/// The answer instead of a review.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// This status and body.
    Answer(u16, Bytes),
    /// Nothing, for as long as the client waits.
    Silence,
}

#[derive(Default)]
pub(crate) struct State {
    /// Extra fields of authenticated tokens, by the token's text.
    pub(crate) accounts: HashMap<String, Value>,
    pub(crate) fault: Option<Fault>,
    /// Duration of a review.
    pub(crate) takes: Duration,
    pub(crate) requests: usize,
    pub(crate) reviews: usize,
    /// Reviews in progress, and their maximum.
    pub(crate) at_once: (usize, usize),
    pub(crate) leases: leases::Leases,
    /// Services, by name.
    pub(crate) services: leases::Leases,
    /// Path, headers and body of the last request.
    pub(crate) last: Option<(String, http::HeaderMap, Value)>,
}

/// A plaintext API server on its own port.
#[derive(Clone)]
pub(crate) struct FakeApi {
    /// Serving ends when the last clone is dropped.
    _serving: Arc<JoinSet<()>>,
    pub(crate) address: SocketAddr,
    pub(crate) state: Arc<Mutex<State>>,
}

/// A token with these claims and an invalid signature.
pub(crate) fn token(payload: &Value) -> String {
    format!("e30.{}.c2ln", URL_SAFE_NO_PAD.encode(payload.to_string()))
}

/// Seconds since 1970, `seconds` from now.
pub(crate) fn in_seconds(seconds: u64) -> u64 {
    #[expect(clippy::disallowed_methods, reason = "tokens end by the time of day")]
    let now = SystemTime::now();
    let now = now.duration_since(UNIX_EPOCH).expect("a time after 1970");
    now.as_secs() + seconds
}

impl FakeApi {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let state = Arc::new(Mutex::new(State::default()));
        let served = Arc::clone(&state);
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((socket, _peer)) = listener.accept().await {
                let state = Arc::clone(&served);
                let service = service_fn(move |request| answer(Arc::clone(&state), request));
                let http = hyper::server::conn::http1::Builder::new();
                let connection = http.serve_connection(TokioIo::new(socket), service);
                connections.spawn(async move { drop(connection.await) });
            }
        });
        Self {
            _serving: Arc::new(serving),
            address,
            state,
        }
    }

    pub(crate) fn kubeconfig(&self) -> String {
        json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "clusters": [{"name": "test", "cluster": {"server": format!("http://{}", self.address)}}],
            "users": [{"name": "test", "user": {"token": "of-the-server"}}],
        })
        .to_string()
    }

    pub(crate) fn write_kubeconfig(&self, path: &Path) {
        std::fs::write(path, self.kubeconfig()).expect("a file");
    }

    /// Issues a token of an account for an audience, bound to a node unless `node` is empty.
    pub(crate) fn issue(&self, account: &str, audience: &str, node: &str) -> String {
        let issued = self.state.lock().expect("the state").accounts.len();
        let text = token(&json!({
            "sub": account,
            "aud": [audience],
            "exp": in_seconds(3600),
            "jti": issued,
        }));
        let extra = match node {
            "" => json!({}),
            node => json!({
                "authentication.kubernetes.io/node-name": [node],
                "authentication.kubernetes.io/pod-uid": [format!("uid-{node}")],
            }),
        };
        let user = json!({"username": account, "audience": audience, "extra": extra});
        self.state
            .lock()
            .expect("it is there")
            .accounts
            .insert(text.clone(), user);
        text
    }

    /// Sets the answer to all further reviews.
    pub(crate) fn set_fault(&self, fault: Option<Fault>) {
        self.state.lock().expect("the state").fault = fault;
    }

    /// Number of requests of any kind.
    pub(crate) fn requests(&self) -> usize {
        self.state.lock().expect("the state").requests
    }

    pub(crate) fn reviews(&self) -> usize {
        self.state.lock().expect("the state").reviews
    }
}

async fn answer(
    state: Arc<Mutex<State>>,
    request: Request<Incoming>,
) -> Result<Response<Answer>, Infallible> {
    let (head, body) = request.into_parts();
    let bytes = body
        .collect()
        .await
        .map(http_body_util::Collected::to_bytes);
    let body: Value = serde_json::from_slice(&bytes.unwrap_or_default()).unwrap_or_default();
    let (fault, takes) = {
        let mut state = state.lock().expect("the state");
        state.requests += 1;
        let is_review = head.uri.path().contains("tokenreviews");
        state.reviews += usize::from(is_review);
        state.at_once.0 += 1;
        state.at_once.1 = state.at_once.1.max(state.at_once.0);
        state.last = Some((
            head.uri.path().to_owned(),
            head.headers.clone(),
            body.clone(),
        ));
        (state.fault.clone(), state.takes)
    };
    let under_way = UnderWay(Arc::clone(&state));
    if !takes.is_zero() {
        tokio::time::sleep(takes).await;
    }
    let reply = |status: u16, body: Bytes| {
        let mut response = Response::new(Full::new(body).boxed_unsync());
        *response.status_mut() = StatusCode::from_u16(status).expect("a status");
        Ok(response)
    };
    match fault {
        Some(Fault::Answer(status, body)) => return reply(status, body),
        Some(Fault::Silence) => std::future::pending().await,
        None => (),
    }
    if head.uri.path().contains("/leases") || head.uri.path().ends_with("/services") {
        return Ok(leases::answer(&state, &head.method, &head.uri, &body));
    }
    let token = body["spec"]["token"].as_str().unwrap_or_default();
    let audiences = &body["spec"]["audiences"];
    let account = state
        .lock()
        .expect("the state")
        .accounts
        .get(token)
        .cloned();
    let status = match account {
        Some(user)
            if audiences
                .as_array()
                .is_some_and(|asked| asked.contains(&user["audience"])) =>
        {
            json!({
                "authenticated": true,
                "audiences": [user["audience"]],
                "user": {"username": user["username"], "extra": user["extra"]},
            })
        }
        _ => json!({"user": {}, "error": "[invalid bearer token, unknown]"}),
    };
    drop(under_way);
    let review = json!({
        "kind": "TokenReview",
        "apiVersion": "authentication.k8s.io/v1",
        "metadata": {},
        "spec": body["spec"],
        "status": status,
    });
    reply(201, review.to_string().into())
}

struct UnderWay(Arc<Mutex<State>>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.lock().expect("the state").at_once.0 -= 1;
    }
}
