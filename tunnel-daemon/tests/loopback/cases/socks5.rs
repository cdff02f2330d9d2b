//! SOCKS5 frontends: every type of address, every reply, bytes that come early, TLS, and who may connect.

use std::net::{Ipv6Addr, SocketAddr};

use adit_testkit::certificates::ThrowawayFiles;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UnixStream};

use crate::support::connect::read_head;
use crate::support::socks5::{ask, counted, echo, hello};
use crate::support::wait::within;
use crate::support::ways::Way;
use crate::support::world::World;
use crate::support::{targets, tls};

const TCP: [&str; 2] = [
    "--frontend=socks5=tcp:127.0.0.1:0",
    "--insecure-plaintext-frontend",
];

fn frontend(world: &World) -> SocketAddr {
    world.server().frontends[0]
}

async fn client(world: &World) -> TcpStream {
    TcpStream::connect(frontend(world))
        .await
        .expect("it listens")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn addresses_of_every_type_are_reached_over_each_kind_of_lane() {
    let v6 = tokio::net::TcpListener::bind((Ipv6Addr::LOCALHOST, 0))
        .await
        .unwrap();
    let v6_port = v6.local_addr().unwrap().port();
    let _v6 = targets::echo_on(v6);
    let (port, _target) = targets::echo().await;
    for way in Way::ALL {
        if !way.is_possible("addresses_of_every_type_are_reached_over_each_kind_of_lane") {
            continue;
        }
        let flags = [&TCP, way.flags()].concat();
        let (world, _agent) = World::warm(&flags, way.flags()).await;
        for (host, port) in [("127.0.0.1", port), ("localhost", port), ("::1", v6_port)] {
            let mut io = client(&world).await;
            assert_eq!(ask(&mut io, &hello(host, port)).await, 0, "{host}");
            echo(&mut io, 3_000_000).await;
        }
    }
}

/// Bytes right behind the request are the tunnel's first, on a unix socket as on TCP; a target may speak first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn early_bytes_and_a_target_that_speaks_first_are_carried() {
    let (port, _target) = targets::echo().await;
    let (first, _first) = targets::server_first(b"220 ready\r\n").await;
    let (world, _agent) = World::linked(&["--frontend=socks5=unix:{certs}/socks.sock"], &[]).await;
    let socket = world.files.dir().join("socks.sock");
    let mut io = UnixStream::connect(&socket).await.expect("it listens");
    let early = [hello("127.0.0.1", port), b"early".to_vec()].concat();
    assert_eq!(ask(&mut io, &early).await, 0);
    let mut back = [0; 5];
    within("the early bytes", io.read_exact(&mut back))
        .await
        .unwrap();
    assert_eq!(&back, b"early");
    echo(&mut io, 100_000).await;

    let mut io = UnixStream::connect(&socket).await.expect("it listens");
    assert_eq!(ask(&mut io, &hello("127.0.0.1", first)).await, 0);
    let mut greeting = [0; 11];
    within("the greeting", io.read_exact(&mut greeting))
        .await
        .unwrap();
    assert_eq!(&greeting, b"220 ready\r\n");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replies_tell_causes_apart() {
    let (port, _target) = targets::echo().await;
    let (_held, closed) = targets::closed_port();
    let rule = format!("--client-allow-target=127.0.0.1:{port}");
    let closed_rule = format!("--client-allow-target={closed}");
    let names = "--client-allow-target=*.invalid";
    let elsewhere = "--client-allow-target=127.0.0.3";
    let flags = [&TCP[..], &[&rule, &closed_rule, names, elsewhere]].concat();
    let world = World::start(&flags).await;
    let mut io = client(&world).await;
    assert_eq!(ask(&mut io, &hello("127.0.0.1", port)).await, 1, "no agent");
    let allowed = [
        "--allow-target=127.0.0.1",
        "--allow-target=no-such-name.invalid",
    ];
    let _agent = world.agent("agent-1", &allowed).await;
    world.links(1).await;
    for (host, port, code) in [
        ("127.0.0.1", port, 0),
        ("127.0.0.1", closed.port(), 5),
        ("127.0.0.2", port, 2),
        ("127.0.0.3", port, 2),
        ("no-such-name.invalid", 80, 4),
    ] {
        let mut io = client(&world).await;
        assert_eq!(
            ask(&mut io, &hello(host, port)).await,
            code,
            "{host}:{port}"
        );
        if code != 0 {
            assert_eq!(io.read(&mut [0]).await.unwrap(), 0, "it is closed");
        }
    }
    world
        .server_metric("adit_dial_failures_total{reason=\"denied\"}", 2.0)
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mutual_tls_is_spoken_before_socks() {
    let (port, _target) = targets::echo().await;
    let rule = format!("--client-allow-target=cn=client,127.0.0.1:{port}");
    let flags = [
        "--frontend=socks5=tcp:127.0.0.1:0",
        "--server-cert={certs}/server.crt",
        "--server-key={certs}/server.key",
        "--server-ca-cert={certs}/ca.crt",
        &rule,
    ];
    let (world, _agent) = World::linked(&flags, &[]).await;
    let files = &world.files;
    for (name, code) in [("client", 0), ("agent", 2)] {
        let identity = (files.cert(name), files.key(name));
        let identity = Some((identity.0.as_path(), identity.1.as_path()));
        // A client behind a TLS wrapper names any protocol, or none.
        let dialed = tls::dial_as(b"anything", frontend(&world), &files.ca_file(), identity).await;
        let mut stream = dialed.expect("a handshake");
        assert_eq!(
            ask(&mut stream, &hello("127.0.0.1", port)).await,
            code,
            "{name}"
        );
        if code == 0 {
            echo(&mut stream, 200_000).await;
        }
    }
}

/// A client that names a user: greeting, name and password, request.
async fn ask_as(io: &mut TcpStream, user: &str, password: &str, port: u16) -> Vec<u8> {
    let request = hello("127.0.0.1", port);
    let all = [
        &[5, 2, 0, 2][..],
        &[1],
        &counted(user),
        &counted(password),
        &request[3..],
    ]
    .concat();
    within("answers", async {
        io.write_all(&all).await.expect("it is taken");
        let mut answers = vec![0; 14];
        let mut read = 0;
        while read < answers.len() {
            match io.read(&mut answers[read..]).await {
                Ok(0) | Err(_) => break,
                Ok(more) => read += more,
            }
        }
        answers.truncate(read);
        answers
    })
    .await
}

/// With users a frontend may listen on all addresses. A changed file holds for new connections; one that is wrong changes nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_users_of_the_file_are_served_by_socks5_and_http() {
    let (port, _target) = targets::echo().await;
    let flags = [
        "--frontend=socks5=tcp:0.0.0.0:0",
        "--frontend=http-proxy=tcp:0.0.0.0:0",
        "--insecure-plaintext-frontend",
        "--frontend-users={certs}/users",
    ];
    let users = |text: &'static str| {
        move |files: &ThrowawayFiles| {
            let (new, file) = (files.dir().join("new"), files.dir().join("users"));
            std::fs::write(&new, text).expect("a file");
            std::fs::rename(new, file).expect("in its place");
        }
    };
    let world = World::start_with(users("prom:secret\n"), &flags).await;
    let _agent = world.agent("agent-1", &[]).await;
    world.links(1).await;
    let served = [&[5, 2, 1, 0, 5, 0][..], &[0, 1, 0, 0, 0, 0, 0, 0]].concat();
    let refused = [5, 2, 1, 1];
    for (user, password, answers) in [
        ("prom", "secret", &served[..]),
        ("prom", "Secret", &refused),
        ("who", "secret", &refused),
        ("prom", "", &refused),
    ] {
        let mut io = client(&world).await;
        assert_eq!(
            ask_as(&mut io, user, password, port).await,
            answers,
            "{user} {password}"
        );
    }
    // Nobody asks without.
    let mut io = client(&world).await;
    io.write_all(&hello("127.0.0.1", port)).await.unwrap();
    let mut answer = Vec::new();
    within("a refusal", io.read_to_end(&mut answer))
        .await
        .unwrap();
    assert_eq!(answer, [5, 255]);

    // prom:secret, prom:Secret
    let ask = async |header: &str| {
        let proxy = world.server().frontends[1];
        let mut io = TcpStream::connect(proxy).await.expect("it listens");
        let request = format!("CONNECT 127.0.0.1:{port} HTTP/1.1\r\nHost: a\r\n{header}\r\n");
        io.write_all(request.as_bytes()).await.expect("it is taken");
        read_head(&mut io).await
    };
    let asked = ask("").await;
    assert!(
        asked.starts_with("HTTP/1.1 407 ") && asked.contains("proxy-authenticate: Basic realm"),
        "{asked}"
    );
    let wrong = ask("Proxy-Authorization: Basic cHJvbTpTZWNyZXQ=\r\n").await;
    assert!(wrong.starts_with("HTTP/1.1 407 "), "{wrong}");
    let right = "Proxy-Authorization: Basic cHJvbTpzZWNyZXQ=\r\n";
    let head = ask(right).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");

    users("no user")(&world.files);
    let reloads = |result| format!("adit_frontend_users_reloads_total{{result=\"{result}\"}}");
    world.server_metric(&reloads("failed"), 1.0).await;
    let head = ask(right).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    users("prom:other\n")(&world.files);
    world.server_metric(&reloads("ok"), 1.0).await;
    let head = ask(right).await;
    assert!(head.starts_with("HTTP/1.1 407 "), "{head}");
}
