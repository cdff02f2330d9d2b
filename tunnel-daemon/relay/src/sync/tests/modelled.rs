//! Stand-ins that loom can interleave. Queues are lists under a lock, since loom cannot look into crossbeam's: what is
//! proven holds for queues whose `push` is seen by every later `pop`. The waker orders memory, as the kernel's locks do.

use std::{any::Any, collections::VecDeque, fmt, panic::resume_unwind, sync};

use loom::sync::{Condvar, Mutex, MutexGuard, atomic::Ordering};

pub(crate) use loom::sync::atomic::{AtomicBool, AtomicUsize};

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("nobody panics with the lock")
}

/// As crossbeam's: bounded, and a full one gives the item back.
pub(crate) struct ArrayQueue<T> {
    items: Mutex<VecDeque<T>>,
    items_max: usize,
}

impl<T> ArrayQueue<T> {
    pub(crate) fn new(items_max: usize) -> Self {
        Self {
            items: Mutex::new(VecDeque::new()),
            items_max,
        }
    }

    pub(crate) fn push(&self, item: T) -> Result<(), T> {
        let mut items = lock(&self.items);
        if items.len() == self.items_max {
            return Err(item);
        }
        items.push_back(item);
        Ok(())
    }

    pub(crate) fn pop(&self) -> Option<T> {
        lock(&self.items).pop_front()
    }
}

impl<T> fmt::Debug for ArrayQueue<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ArrayQueue")
    }
}

/// As crossbeam's, without a bound.
#[derive(Debug)]
pub(crate) struct SegQueue<T>(ArrayQueue<T>);

impl<T> SegQueue<T> {
    pub(crate) fn new() -> Self {
        Self(ArrayQueue::new(usize::MAX))
    }

    pub(crate) fn push(&self, item: T) {
        let Ok(()) = self.0.push(item) else {
            unreachable!("no list is that long");
        };
    }

    pub(crate) fn pop(&self) -> Option<T> {
        self.0.pop()
    }
}

/// A value published by a flag, so that loom may look in between.
#[derive(Debug)]
pub(crate) struct OnceLock<T> {
    value: sync::OnceLock<T>,
    is_set: AtomicBool,
}

impl<T> OnceLock<T> {
    pub(crate) fn new() -> Self {
        Self {
            value: sync::OnceLock::new(),
            is_set: AtomicBool::new(false),
        }
    }

    pub(crate) fn set(&self, value: T) -> Result<(), T> {
        let outcome = self.value.set(value);
        self.is_set.store(true, Ordering::Release);
        outcome
    }

    pub(crate) fn get(&self) -> Option<&T> {
        let is_set = self.is_set.load(Ordering::Acquire);
        is_set.then(|| self.value.get()).flatten()
    }
}

/// An eventfd watched edge triggered.
#[derive(Debug, Default)]
pub(in crate::sync) struct Edge {
    is_set: Mutex<bool>,
    changed: Condvar,
}

impl Edge {
    pub(in crate::sync) fn set(&self) {
        *lock(&self.is_set) = true;
        self.changed.notify_one();
    }

    pub(in crate::sync) fn wait(&self) {
        let mut is_set = lock(&self.is_set);
        while !*is_set {
            is_set = self
                .changed
                .wait(is_set)
                .expect("nobody panics with the lock");
        }
        *is_set = false;
    }
}

/// A relay thread mends planted faults; what loom has to say is not one.
pub(crate) fn pass_on_findings(panic: Box<dyn Any + Send>) {
    let is_planted = panic
        .downcast_ref::<&str>()
        .is_some_and(|text| text.contains("planted"));
    if !is_planted {
        resume_unwind(panic);
    }
}
