//! A server that takes the call and says nothing, on paused time.

use adit_core::ids::AgentId;
use adit_core::wire::identifiers::Identifiers;
use adit_core::wire::metadata::Extensions;
use tokio::io::duplex;
use tokio::time::Instant;

use super::*;

#[tokio::test(start_paused = true)]
async fn response_headers_are_waited_for_ten_seconds() {
    let (ours, theirs) = duplex(1 << 16);
    let silent = async {
        let mut connection = h2::server::handshake(theirs).await.unwrap();
        let (_request, _respond) = connection.accept().await.unwrap().unwrap();
        // Pings and windows are answered; the call is not.
        while connection.accept().await.is_some() {}
    };
    let identity = Identity {
        hello: AgentHello {
            agent: AgentId::new("a"),
            identifiers: Identifiers::default(),
            extensions: Extensions::default(),
        },
        token: None,
    };
    let started = Instant::now();
    let opening = open(ours, "server", &identity, Duration::from_secs(3600));
    let opened = tokio::select! {
        opened = opening => opened,
        () = silent => panic!("the agent hung up"),
    };
    assert!(matches!(opened.err(), Some(ConnectError::Silent)));
    assert_eq!(started.elapsed(), Duration::from_secs(10));
}
