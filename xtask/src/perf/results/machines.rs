//! Results as a file for machines, and back.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{Entry, Measured, Results};
use crate::perf::scenario::Way;

/// What of such a file the results are.
#[derive(Deserialize)]
struct File {
    peers: Vec<Peer>,
    #[serde(default)]
    ways_missing: BTreeMap<Way, String>,
    measured: BTreeMap<String, BTreeMap<Way, Measured>>,
}

/// With a version, or with why it is missing.
#[derive(Deserialize)]
struct Peer {
    name: String,
    version: Option<String>,
    missing: Option<String>,
}

impl Results {
    /// Everything, for machines.
    pub(crate) fn for_machines(&self) -> serde_json::Value {
        let mut all = serde_json::Map::new();
        for ((peer, way), measured) in &self.measured {
            let ways = all
                .entry(peer.clone())
                .or_insert_with(|| serde_json::json!({}));
            if let Some(ways) = ways.as_object_mut() {
                ways.insert(way.name().to_owned(), serde_json::json!(measured));
            }
        }
        let peer = |entry: &Entry| match &entry.state {
            Ok(version) => serde_json::json!({ "name": entry.name, "version": version }),
            Err(why) => serde_json::json!({ "name": entry.name, "missing": why }),
        };
        let peers: Vec<serde_json::Value> = self.peers.iter().map(peer).collect();
        let ways_missing: BTreeMap<&str, &str> = self
            .ways_missing
            .iter()
            .map(|(way, why)| (way.name(), why.as_str()))
            .collect();
        serde_json::json!({ "peers": peers, "ways_missing": ways_missing, "measured": all })
    }

    /// What [`Self::for_machines`] wrote.
    ///
    /// # Errors
    /// It is no such file.
    pub(crate) fn from_machines(text: &str) -> serde_json::Result<Self> {
        let file: File = serde_json::from_str(text)?;
        let peers = file.peers.into_iter().map(|peer| Entry {
            name: peer.name,
            state: match peer.missing {
                Some(why) => Err(why),
                None => Ok(peer.version.unwrap_or_default()),
            },
        });
        let measured = file.measured.into_iter().flat_map(|(peer, ways)| {
            let of_way = move |(way, measured)| ((peer.clone(), way), measured);
            ways.into_iter().map(of_way)
        });
        Ok(Self {
            peers: peers.collect(),
            ways_missing: file.ways_missing,
            measured: measured.collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::Sample;
    use super::*;

    #[test]
    fn a_file_of_results_is_read_as_it_was_written() {
        let mut results = Results::default();
        for (name, state) in [("adit", Ok("1.0")), ("rathole", Err("no cargo"))] {
            results.peers.push(Entry {
                name: name.to_owned(),
                state: state.map(str::to_owned).map_err(str::to_owned),
            });
        }
        let sample = Sample {
            values: [("bulk_down_1_gbit_s".to_owned(), 7.5)].into(),
            ..Sample::default()
        };
        results.add(("adit", Way::GrpcGo), 1, "bulk", Ok(sample));
        results.add(("adit", Way::Tcp), 1, "echo", Err("it hangs".to_owned()));
        let why = "no Go toolchain".to_owned();
        results.ways_missing.insert(Way::GrpcGo, why);
        let written = results.for_machines();
        let read = Results::from_machines(&written.to_string()).expect("results");
        assert_eq!(read.for_machines(), written);
        assert!(Results::from_machines("{}").is_err());
    }
}
