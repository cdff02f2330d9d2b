//! What tunnels travel on, as servers of ours count it.

use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::Context as _;

/// Longest wait for more of an answer.
const LIMIT: Duration = Duration::from_secs(10);

/// Tunnels that a server has opened so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Opened {
    on_lanes: f64,
    all: f64,
}

impl Opened {
    /// Asks the server at `address`, a host and a port, for its metrics. One that is not ours has no such numbers: zero.
    ///
    /// # Errors
    /// It does not answer.
    pub(crate) fn at(address: &str) -> anyhow::Result<Self> {
        let text = ask(address).with_context(|| format!("asking {address} for metrics"))?;
        Ok(Self::read(&text))
    }

    fn read(text: &str) -> Self {
        let mut opened = Self::default();
        for line in text.lines() {
            let labelled = line.strip_prefix("adit_tunnels_opened_total{path=\"");
            let Some((path, count)) = labelled.and_then(|rest| rest.split_once("\"} ")) else {
                continue;
            };
            let count: f64 = count.trim().parse().unwrap_or_default();
            opened.all += count;
            if path != "link" {
                opened.on_lanes += count;
            }
        }
        opened
    }

    /// How many of 100 tunnels that were opened since `before` found a lane; `None` if none was opened.
    pub(crate) fn lanes_percent(self, before: Self) -> Option<f64> {
        let all = self.all - before.all;
        (all > 0.0).then(|| 100.0 * (self.on_lanes - before.on_lanes) / all)
    }
}

fn ask(address: &str) -> io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.write_all(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_of_every_kind_count_against_all_tunnels_since() {
        let text = |lane, raw, link| {
            format!(
                "HTTP/1.0 200 OK\r\n\r\n# TYPE adit_tunnels_opened_total counter\n\
                 adit_tunnels_opened_total{{path=\"ktls-lane\"}} 0\n\
                 adit_tunnels_opened_total{{path=\"lane\"}} {lane}\n\
                 adit_tunnels_opened_total{{path=\"link\"}} {link}\n\
                 adit_tunnels_opened_total{{path=\"raw-lane\"}} {raw}\n\
                 adit_node_tunnels_opened_total 99\n"
            )
        };
        let before = Opened::read(&text(10, 5, 7));
        let after = Opened::read(&text(1000, 65, 7 + 150));
        assert_eq!(after.lanes_percent(before), Some(87.5));
        assert_eq!(after.lanes_percent(after), None);
    }

    #[test]
    fn servers_of_others_have_opened_none() {
        let other = Opened::read("HTTP/1.0 404 Not Found\r\n\r\n404 page not found\n");
        assert_eq!(other, Opened::default());
        assert_eq!(other.lanes_percent(other), None);
    }
}
