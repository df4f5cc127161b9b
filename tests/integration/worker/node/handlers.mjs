// Functions written with AWS's durable SDK for TypeScript, as it is.
import { appendFileSync, readFileSync } from "node:fs";
import { withDurableExecution } from "@aws/durable-execution-sdk-js";

export const everything = withDurableExecution(async (event, context) => {
  const found = { step: await context.step("add", async () => event.n + 1) };
  await context.wait("rest", { hours: 1 });
  const mapped = await context.map("tens", [1, 2, 3], async (child, item) => child.step(async () => item * 10));
  found.mapped = mapped.getResults();
  found.asked = await context.waitForCallback("approve", async (callbackId) => {
    appendFileSync(`${process.env.NOTES}/callback`, `${callbackId}\n`);
  });
  return found;
});

export const dies = withDurableExecution(async (event, context) => {
  await context.step("before", async () => appendFileSync(`${process.env.NOTES}/before`, "once\n"));
  return context.step("deadly", async () => {
    appendFileSync(`${process.env.NOTES}/deadly`, `${process.pid}\n`);
    if (readFileSync(`${process.env.NOTES}/deadly`, "utf8").split("\n").length === 2) process.kill(process.pid, "SIGKILL");
    return "survived";
  });
});
