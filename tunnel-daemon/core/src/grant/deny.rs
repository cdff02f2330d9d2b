//! Deny list: agents that are refused even if they authenticate and grants allow their claims.

use super::pattern::Pattern;
use super::{Flaw, Holder, NameKind, names_of};
use crate::ids::AgentId;
use crate::text::Excerpt;

/// Entries in the order of their lines; an empty list denies no agent.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct DenyList(Vec<DenyEntry>);

/// Why a line is not a valid entry.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("line {line}, {text:?}: {flaw}")]
pub struct DenyError {
    line: usize,
    text: String,
    flaw: Flaw,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct DenyEntry {
    /// The entry as written.
    text: String,
    what: What,
    value: Pattern,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum What {
    Id,
    Pod,
    Name(NameKind),
}

impl DenyList {
    /// Parses one `KEY=VALUE` per line. `*` in a value matches any text that is not empty. `#` at the start of a line or after
    /// a space begins a comment.
    ///
    /// # Errors
    /// The first invalid line.
    pub fn parse(text: &str) -> Result<Self, DenyError> {
        let mut entries = Vec::new();
        for (at, line) in text.lines().enumerate() {
            // Names may contain `#`, so only ` #` begins a comment.
            let line = line.split(" #").next().unwrap_or_default().trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let entry = DenyEntry::parse(line).map_err(|flaw| DenyError {
                line: at + 1,
                text: Excerpt(line).to_string(),
                flaw,
            })?;
            entries.push(entry);
        }
        Ok(Self(entries))
    }

    /// The entry that denies an agent with this id or one of these holders.
    #[must_use]
    pub fn entry_for(&self, agent: &AgentId, holders: &[Holder<'_>]) -> Option<&str> {
        let entry = self.0.iter().find(|entry| entry.names(agent, holders))?;
        Some(&entry.text)
    }
}

impl DenyEntry {
    fn parse(line: &str) -> Result<Self, Flaw> {
        let (key, value) = line
            .split_once('=')
            .ok_or_else(|| Flaw::NotDenied(line.to_owned()))?;
        let (key, value) = (key.trim(), value.trim());
        let (key, what) = match key {
            "id" => ("id", What::Id),
            "cn" => ("cn", What::Name(NameKind::Common)),
            "dns" => ("dns", What::Name(NameKind::Dns)),
            "uri" => ("uri", What::Name(NameKind::Uri)),
            "serviceaccount" => ("serviceaccount", What::Name(NameKind::Account)),
            "node" => ("node", What::Name(NameKind::Node)),
            "pod" => ("pod", What::Pod),
            other => return Err(Flaw::NotDenied(Excerpt(other).to_string())),
        };
        let value = Pattern::parse(key, value)?;
        Ok(Self {
            text: line.to_owned(),
            what,
            value: if what == What::Name(NameKind::Dns) {
                value.to_lowercase()
            } else {
                value
            },
        })
    }

    fn names(&self, agent: &AgentId, holders: &[Holder<'_>]) -> bool {
        let is = |text: &str| self.value.match_text(text).is_some();
        match self.what {
            What::Id => is(agent.as_str()),
            What::Pod => holders.iter().any(|holder| match holder {
                Holder::Certificate(_) => false,
                Holder::ServiceAccount(account) => account.pod.is_some_and(is),
            }),
            What::Name(kind) => holders
                .iter()
                .any(|holder| names_of(*holder, kind).iter().any(|name| is(name))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Account, Names};
    use super::*;

    #[test]
    fn an_agent_is_denied_by_id_certificate_or_token() {
        let list = DenyList::parse(
            "# stolen\nid=edge-7\nid=a#b\ncn=old-* # renewed\ndns=A.example\n\nserviceaccount=n/s\nnode=node-1\npod=1234\n",
        )
        .unwrap();
        let alternative = ["dns:a.Example".to_owned()];
        let certificate = |common_name, alternative| {
            Holder::Certificate(Names {
                common_name: Some(common_name),
                alternative,
            })
        };
        let token = |name, node, pod| {
            Holder::ServiceAccount(Account {
                namespace: "n",
                name,
                node: Some(node),
                pod: Some(pod),
            })
        };
        for (id, holder, entry) in [
            ("edge-7", None, Some("id=edge-7")),
            ("edge-70", None, None),
            ("a#b", None, Some("id=a#b")),
            ("a", Some(certificate("old-1", &[])), Some("cn=old-*")),
            (
                "a",
                Some(certificate("new-1", &alternative)),
                Some("dns=A.example"),
            ),
            ("a", Some(certificate("new-1", &[])), None),
            (
                "a",
                Some(token("s", "node-2", "1")),
                Some("serviceaccount=n/s"),
            ),
            ("a", Some(token("t", "node-1", "1")), Some("node=node-1")),
            ("a", Some(token("t", "node-2", "1234")), Some("pod=1234")),
            ("a", Some(token("t", "node-2", "12345")), None),
        ] {
            let holders: Vec<Holder<'_>> = holder.into_iter().collect();
            assert_eq!(
                list.entry_for(&AgentId::new(id), &holders),
                entry,
                "{id} {holders:?}"
            );
        }
        assert_eq!(DenyList::default().entry_for(&AgentId::new("a"), &[]), None);
    }

    #[test]
    fn invalid_deny_list_lines_are_reported() {
        for (text, says) in [
            ("id=a\nedge-7", "line 2, \"edge-7\": "),
            ("host=a", "id, cn, dns, uri, serviceaccount, node, pod"),
            ("id=", "id has no value"),
            ("id=a*b*c", "more than one *"),
        ] {
            let error = DenyList::parse(text).unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
