//! Families and label values as they are declared: what the page of metrics is written from.

use std::any::type_name;
use std::cell::RefCell;
use std::collections::BTreeMap;

use prometheus::core::Collector;

use crate::labels::Label;

#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Family {
    pub(crate) kind: &'static str,
    pub(crate) labels: Vec<String>,
    pub(crate) help: String,
}

/// Families by name; values of their label, with what they mean.
#[derive(Default)]
pub(crate) struct Declared {
    pub(crate) families: BTreeMap<String, Family>,
    pub(crate) values: BTreeMap<String, Vec<(&'static str, &'static str)>>,
}

thread_local! {
    static DECLARED: RefCell<Declared> = RefCell::default();
}

/// One was declared.
pub(crate) fn family<C: Collector>(collector: &C) {
    let kinds = ["Counter", "Gauge", "Histogram"];
    let kind = kinds
        .into_iter()
        .find(|kind| type_name::<C>().contains(kind));
    DECLARED.with_borrow_mut(|declared| {
        for desc in collector.desc() {
            let family = Family {
                kind: kind.expect("one of the three"),
                labels: desc.variable_labels.clone(),
                help: desc.help.clone(),
            };
            declared.families.insert(desc.fq_name.clone(), family);
        }
    });
}

/// One that has a series for each value.
pub(crate) fn values<L: Label>(name: &str) {
    let values = L::ALL.iter().map(|value| (value.as_str(), value.meaning()));
    DECLARED.with_borrow_mut(|declared| declared.values.insert(name.to_owned(), values.collect()));
}

pub(crate) fn declared_by<T>(register: impl FnOnce() -> T) -> Declared {
    DECLARED.take();
    register();
    DECLARED.take()
}
