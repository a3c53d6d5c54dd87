// Where the browser keeps things: chats in IndexedDB, settings and the key in localStorage. None of it leaves the
// browser but for the messages of a prompt and the key, which go to the server that the page came from.

const DATABASE = "sharpi";
const CHATS = "chats";

let opened = null;

function database() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(DATABASE, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(CHATS, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened;
}

async function run(mode, work) {
  const transaction = (await database()).transaction(CHATS, mode);
  return new Promise((resolve, reject) => {
    const request = work(transaction.objectStore(CHATS));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

// Pages of the same server in other tabs list the same chats.
const tabs = new BroadcastChannel("sharpi-chats");

export function onOtherTabs(listener) {
  tabs.onmessage = ({ data }) => listener(data);
}

/** All chats, the last changed first. */
export async function allChats() {
  return (await run("readonly", (store) => store.getAll())).sort((a, b) => b.changed - a.changed);
}

export async function saveChat(chat) {
  await run("readwrite", (store) => store.put(chat));
  tabs.postMessage(chat.id);
}

export async function deleteChat(id) {
  await run("readwrite", (store) => store.delete(id));
  tabs.postMessage(id);
}

export function remembered(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(`sharpi.${name}`)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export function remember(name, value) {
  try {
    localStorage.setItem(`sharpi.${name}`, JSON.stringify(value));
  } catch {
    // A browser that keeps nothing still shows the page.
  }
}
