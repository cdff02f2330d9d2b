//! A stub of the Kubernetes API for servers that authenticate agents by token: it answers a TokenReview with the token's own
//! claims. Tokens have no signature; the server under test cannot tell.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// Namespace of the tokens' service account.
const NAMESPACE: &str = "kube-system";
const ACCOUNT: &str = "konnectivity-agent";
/// Audience of the tokens.
const AUDIENCE: &str = "system:konnectivity-server";
/// Text before and after a token's claims: an empty header, and a placeholder for the signature.
const HEAD: &str = "e30.";
const TAIL: &str = ".c2ln";
/// Lifetime of a token: longer than any measurement.
const LIFETIME_SECONDS: u64 = 24 * 3600;

/// Writes a token bound to node `number`, and returns its path.
///
/// # Errors
/// The folder is not writable.
pub(crate) fn write_token(folder: &Path, number: usize) -> anyhow::Result<PathBuf> {
    #[expect(clippy::disallowed_methods, reason = "tokens end by the time of day")]
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let claims = json!({
        "sub": format!("system:serviceaccount:{NAMESPACE}:{ACCOUNT}"),
        "aud": [AUDIENCE],
        "exp": now + LIFETIME_SECONDS,
        "kubernetes.io": {"namespace": NAMESPACE, "node": {"name": format!("node-{number}")}},
    });
    let token = format!("{HEAD}{}{TAIL}", URL_SAFE_NO_PAD.encode(claims.to_string()));
    let path = folder.join(format!("token-{number}"));
    fs::write(&path, token).with_context(|| format!("writing {}", path.display()))?;
    Ok(path)
}

/// Serves reviews until standard input closes.
///
/// # Errors
/// No port is free, or the folder is not writable.
pub(crate) fn serve(folder: &Path) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Runtime::new()?;
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0"))?;
    let address = listener.local_addr()?.to_string();
    let kubeconfig = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "load",
        "contexts": [{"name": "load", "context": {"cluster": "load", "user": "load"}}],
        "clusters": [{"name": "load", "cluster": {"server": format!("http://{address}")}}],
        "users": [{"name": "load", "user": {"token": "of-the-server"}}],
    });
    fs::write(folder.join("kubeconfig"), kubeconfig.to_string())?;
    // For the agent on the measured path; agents of the load generator have their own tokens.
    fs::rename(write_token(folder, usize::MAX)?, folder.join("token"))?;
    let _serving = runtime.spawn(accept(listener));
    println!("{}", json!({"reviews": address}));
    crate::parent_death::until_stdin_closes()
}

async fn accept(listener: TcpListener) {
    let mut connections = JoinSet::new();
    while let Ok((socket, _peer)) = listener.accept().await {
        while connections.try_join_next().is_some() {}
        connections.spawn(async move {
            let _late_answers = socket.set_nodelay(true);
            let serve =
                http1::Builder::new().serve_connection(TokioIo::new(socket), service_fn(answer));
            // The client may have disconnected.
            let _gone = serve.await;
        });
    }
}

async fn answer(request: Request<Incoming>) -> http::Result<Response<Full<Bytes>>> {
    let body = request.into_body().collect().await;
    let body = body.map(http_body_util::Collected::to_bytes);
    let (status, text) = match reviewed(&body.unwrap_or_default()) {
        Some(review) => (StatusCode::CREATED, review.to_string()),
        None => (StatusCode::BAD_REQUEST, String::new()),
    };
    Response::builder()
        .status(status)
        .header(http::header::CONTENT_TYPE, "application/json")
        .body(Full::from(text))
}

/// The answer to a review; `None`: it contains no token of this program. Go clients write reviews as protobuf and accept JSON,
/// so the token is searched for in the bytes.
fn reviewed(review: &[u8]) -> Option<Value> {
    let text = String::from_utf8_lossy(review);
    let (_before, token) = text.split_once(HEAD)?;
    let (claims, _behind) = token.split_once(TAIL)?;
    let claims = URL_SAFE_NO_PAD.decode(claims).ok()?;
    let claims: Value = serde_json::from_slice(&claims).ok()?;
    let node = &claims["kubernetes.io"]["node"]["name"];
    Some(json!({
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "status": {
            "authenticated": true,
            "audiences": claims["aud"],
            "user": {
                "username": claims["sub"],
                "extra": {"authentication.kubernetes.io/node-name": [node]},
            },
        },
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_review_reports_the_node_of_its_token() {
        let folder = tempfile::tempdir().unwrap();
        let path = write_token(folder.path(), 7).unwrap();
        let token = fs::read_to_string(path).unwrap();
        let json = json!({"spec": {"token": token}}).to_string();
        let protobuf = [b"k8s\0\x12\xff", token.as_bytes(), b"\x12\x03aud"].concat();
        for review in [json.as_bytes(), &protobuf] {
            let answer = reviewed(review).unwrap();
            let status = &answer["status"];
            assert_eq!(status["audiences"], json!([AUDIENCE]));
            let extra = &status["user"]["extra"]["authentication.kubernetes.io/node-name"];
            assert_eq!(*extra, json!(["node-7"]));
        }
        assert_eq!(reviewed(b"a.b.c"), None);
    }
}
