//! The admin socket as an HTTP server: no client keeps the server from answering the next one.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use adit::status::model::{API, Status};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::task::JoinSet;

use crate::support::wait::within;
use crate::support::world::World;

async fn world() -> (World, PathBuf) {
    let world = World::start(&["--admin-socket={certs}/admin.sock"]).await;
    let socket = world.admin_socket();
    (world, socket)
}

async fn connect(socket: &Path) -> UnixStream {
    within("a connection", UnixStream::connect(socket))
        .await
        .expect("the socket is there")
}

/// Sends `request` and reads to EOF. Returns head and body of the response.
async fn ask(socket: &Path, request: &str) -> (String, String) {
    let mut stream = connect(socket).await;
    let asking = async {
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok::<_, std::io::Error>(answer)
    };
    let answer = within("an answer", asking).await.expect("an answer");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    (head.to_owned(), body.to_owned())
}

fn request(method: &str, path: &str) -> String {
    format!("{method} {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
}

async fn status(socket: &Path) -> Status {
    let (head, body) = ask(socket, &request("GET", "/v1/status")).await;
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    serde_json::from_str(&body).expect("JSON")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_paths_get_404_and_wrong_methods_get_405() {
    let (_world, socket) = world().await;
    for path in ["/v1/status", "/v1/tunnels", "/v1/links"] {
        for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"] {
            let (head, _body) = ask(&socket, &request(method, path)).await;
            assert!(head.starts_with("HTTP/1.1 405"), "{method} {path}: {head}");
            let allows = head.lines().any(|line| line == "allow: GET, HEAD");
            assert!(allows, "{head}");
        }
        let (head, body) = ask(&socket, &request("HEAD", path)).await;
        assert!(
            head.starts_with("HTTP/1.1 200") && body.is_empty(),
            "{head}"
        );
        let (head, body) = ask(&socket, &request("GET", path)).await;
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        assert!(body.contains(&format!("\"api\":{API}")), "{body}");
    }
    for path in ["/v1/drain", "/v1/unlink", "/v1/log"] {
        for method in ["GET", "HEAD", "PUT", "DELETE"] {
            let (head, _body) = ask(&socket, &request(method, path)).await;
            assert!(head.starts_with("HTTP/1.1 405"), "{method} {path}: {head}");
            assert!(head.lines().any(|line| line == "allow: POST"), "{head}");
        }
    }
    for path in ["/", "/v1", "/v1/", "/v1/statuses", "/v2/status", "/metrics"] {
        let (head, _body) = ask(&socket, &request("GET", path)).await;
        assert!(head.starts_with("HTTP/1.1 404"), "{path}: {head}");
    }
    let (head, body) = ask(&socket, &request("GET", "/v1/tunnels?sort=beauty")).await;
    assert!(head.starts_with("HTTP/1.1 400"), "{head}");
    assert!(body.contains("sort"), "{body}");
    // Bytes that are not HTTP end only their own connection.
    let (head, _body) = ask(&socket, "SSH-2.0-OpenSSH\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 400"), "{head}");
    status(&socket).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_endless_request_is_refused_at_the_size_limit() {
    let (_world, socket) = world().await;
    let (mut reading, mut writing) = connect(&socket).await.into_split();
    let sending = async {
        let head = b"GET /v1/status HTTP/1.1\r\nHost: a\r\nX-Long: ";
        let mut sent = writing.write_all(head).await;
        // 4 MiB: more than the head limit and the socket buffers together.
        let part = vec![b'x'; 64 * 1024];
        for _part in 0..64 {
            if sent.is_ok() {
                sent = writing.write_all(&part).await;
            }
        }
        sent.is_err()
    };
    let receiving = async {
        let mut answer = Vec::new();
        // The server closes the connection with unread input, so a reset follows the answer.
        let _reset = reading.read_to_end(&mut answer).await;
        String::from_utf8_lossy(&answer).into_owned()
    };
    let both = async { tokio::join!(sending, receiving) };
    let (refused, answer) = within("a refusal", both).await;
    assert!(refused, "all of it was taken");
    // The reset may overtake the answer on a busy machine.
    assert!(
        answer.is_empty() || answer.starts_with("HTTP/1.1 431"),
        "{answer}"
    );
    status(&socket).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_clients_at_once_are_all_answered() {
    let (_world, socket) = world().await;
    let socket: Arc<Path> = socket.into();
    let mut clients = JoinSet::new();
    for _client in 0..64 {
        let socket = Arc::clone(&socket);
        clients.spawn(async move { status(&socket).await.id });
    }
    let ids = within("all answers", clients.join_all()).await;
    assert_eq!(ids.len(), 64);
    assert!(ids.iter().all(|id| *id == ids[0]));
}

/// More clients than the server has connection slots. Each sends more requests than the buffers hold and reads no response.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_never_read_do_not_block_other_clients() {
    let (_world, socket) = world().await;
    let questions = "GET /v1/status HTTP/1.1\r\nHost: a\r\n\r\n".repeat(2000);
    let mut silent = Vec::new();
    for _client in 0..300 {
        let stream = connect(&socket).await;
        // Writes as much as the socket buffer takes.
        stream.writable().await.expect("it is open");
        let sent = stream.try_write(questions.as_bytes());
        assert!(sent.is_ok_and(|bytes| bytes > 0));
        silent.push(stream);
    }
    for _question in 0..3 {
        status(&socket).await;
    }
    drop(silent);
}
